"""Where a peer stands on each axis: what a branch or a return may begin with here."""

from collections.abc import Mapping

from farflock.swarm.peer.round_log import StreamState
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.axes import Floor

Streams = Mapping[str, StreamState]


def changes(streams: Streams, stage: int | None = None) -> bool:
    """True if there are streams that change a stage (None: whole models) here."""
    return any(state.changes(stage) for state in streams.values())


def first_open(streams: Streams, stage: int | None = None) -> int:
    """Return the first round of the streams that change a stage (None: whole models) that is not
    wholly here; 0 without such streams."""
    states = [state for state in streams.values() if state.changes(stage)]
    return min((state.whole + state.stream.cadence.stride for state in states), default=0)


def are_within(streams: Streams, begins: Floor) -> bool:
    """True if no state here is of later rounds than those before `begins`: a return may begin
    there."""
    stages = {state.stream.stage for state in streams.values() if state.stream.wants == "all"}
    return all(first_open(streams, stage) <= axes.at(begins, stage) for stage in stages)


def are_before(streams: Streams, begins: Floor) -> bool:
    """True if nothing that is here of any stream is of a round from `begins` on."""
    states = [state for state in streams.values() if state.stream.wants == "all"]
    return all(state.whole < axes.at(begins, state.stream.stage) for state in states)
