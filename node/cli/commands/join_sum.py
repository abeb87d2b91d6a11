"""The part of `--dry-run` that says how long a newcomer needs, beside the rounds that go on: the
sum of swarm/join_time.py, before there is a run that could be measured."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from farflock.swarm.join_time import HELP, HOPELESS_ABOVE, TELL_ABOVE, clock

if TYPE_CHECKING:
    from farflock.node.run.manifest import Manifest
    from farflock.node.train.run_size import StreamSize


class _Share(NamedTuple):
    """A newcomer's share of a run: its state's size, and the streams that it is in."""

    state_bytes: int
    streams: "Sequence[StreamSize]"


def join_facts(
    described: "Manifest",
    streams: "Sequence[StreamSize]",
    members: int,
    bytes_per_s: float,
    step_s: float,
) -> dict[str, Any]:
    """Return the sum of a newcomer's download for `--json`, for the stage that takes longest: the
    state's bytes, the share of the line that rounds take, and the seconds without and beside them;
    null if rounds take all of it."""
    sums = [_sum(share, members, bytes_per_s, step_s) for share in _shares(described, streams)]
    return max(sums, key=lambda each: each["join_s"] or math.inf)


def _shares(described: "Manifest", streams: "Sequence[StreamSize]") -> list[_Share]:
    from farflock.node.run.fit import SHARED_MOMENTS
    from farflock.node.run.memory import VALUE_BYTES, moment_bytes, stage_parameters
    from farflock.node.train.run_size import state_bytes
    from farflock.optimizers.catalog import unfolded

    plan, pipeline = described.plan(), described.pipeline_plan()
    # most methods keep the weights among their own fields, as of the last round
    whole = max(state_bytes(plan, shared=True), VALUE_BYTES * plan.model.parameters())
    if unfolded(plan.method)[0] in SHARED_MOMENTS:
        whole += moment_bytes(plan)
    if pipeline is None:
        return [_Share(whole, streams)]
    parameters = plan.model.parameters()
    return [
        _Share(
            whole * stage_parameters(plan.model, span) // parameters,
            [each for each in streams if each.stream.endswith(f"/{stage}")],
        )
        for stage, span in enumerate(pipeline.stages)
    ]


def _sum(share: _Share, members: int, bytes_per_s: float, step_s: float) -> dict[str, Any]:
    rounds = sum(_bytes_per_s(each, members, bytes_per_s, step_s) for each in share.streams)
    busy, alone_s = rounds / bytes_per_s, share.state_bytes / bytes_per_s
    return {
        "state_bytes": share.state_bytes,
        "rounds_share": busy,
        "alone_s": alone_s,
        "join_s": alone_s / (1 - busy) if busy < 1 else None,
    }


def _bytes_per_s(stream: "StreamSize", members: int, bytes_per_s: float, step_s: float) -> float:
    """Return the rate of a stream's rounds, which begin after their steps, and never before the
    line is free again."""
    size = stream.sent_bytes(members)
    return size / max(stream.steps * step_s, size / bytes_per_s) if size else 0.0


def join_text(facts: dict[str, Any]) -> str:
    """Return the sum as a line for people, with what would help where rounds take much."""
    busy, state = facts["rounds_share"], f"{facts['state_bytes'] / 1e6:,.1f} MB of state"
    alone = clock(facts["alone_s"])
    if busy > HOPELESS_ABOVE:
        return (
            f"join       {state}: rounds take {busy:.0%} of this line, so a newcomer would hardly"
            f" ever catch up; use {HELP}, or a faster line"
        )
    line = f"join       {state}: {alone} on this line"
    if busy:
        line += f", {clock(facts['join_s'])} beside rounds, which take {busy:.0%} of it"
    return f"{line}; {HELP} would leave more" if busy > TELL_ABOVE else line
