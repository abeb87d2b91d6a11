"""A node's part in a run: a whole replica, stages of a pipeline, or a user's own loop.

The process that runs a node, its status and the live view know it by this protocol alone.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from farflock.node.loop import Loop
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress

SavedT_contra = TypeVar("SavedT_contra", contravariant=True)


class Part(Protocol[SavedT_contra]):
    """A node's work in a run, over its running peer; `SavedT` is what it resumes from.

    One of `found`, `join` and `resume` comes first, then `run`. A newcomer asks to be a member only
    once it has the run's state."""

    @property
    def peer(self) -> Peer: ...
    @property
    def role(self) -> str: ...  # as in the peer's record
    @property
    def step(self) -> int: ...  # local steps; for a trainer of a pipeline, microbatches begun
    @property
    def tokens(self) -> int: ...  # the run's: agreed, and an estimate of what came since
    @property
    def trained_tokens(self) -> int: ...  # this node's own
    @property
    def last_loss(self) -> float | None: ...  # None before the first
    @property
    def work(self) -> dict[str, int]: ...  # counts of work other than steps
    @property
    def coded_on(self) -> str: ...  # where the method's exchanges compute; nothing: on the CPU
    @property
    def twin(self) -> str: ...  # a member that was seen to send the same updates; nothing: none
    @property
    def watch(self) -> EvaluationWatch | None: ...  # None: the run is not evaluated here
    @property
    def evaluates(self) -> bool: ...  # whether it may be drawn to measure
    @property
    def unmerged(self) -> bool: ...  # whether work that counts is only here, until its next merge
    @property
    def stopping(self) -> bool: ...

    def waits(self) -> list[OpenWait]:
        """Return the waits for other peers that are open now."""
        ...

    def stop(self) -> None:
        """Ask `run` to end after the current step."""
        ...

    def found(self) -> None:
        """Start the run with this node's weights."""
        ...

    async def join(
        self, records: Sequence[bytes], timeout_s: float, downloaded: DownloadProgress = ...
    ) -> None:
        """Join through the members with these records; raise `TimeoutError` if none answers."""
        ...

    async def resume(self, saved: SavedT_contra) -> None:
        """Start a run again, which no other peer has kept, where this node stopped."""
        ...

    async def run(self, total_tokens: int) -> None:
        """Take part until the run has its tokens, or until `stop` is called."""
        ...


class WholePart:
    """The members that a part with a whole model, which has one loop, takes from that loop."""

    __slots__ = ()
    peer: Peer
    loop: Loop

    @property
    def role(self) -> str:
        """The role in the peer's record."""
        return "replica"

    @property
    def step(self) -> int:
        """The number of local steps."""
        return self.loop.step

    @property
    def tokens(self) -> int:
        """The agreed tokens plus an estimate of what all members have trained since."""
        return self.loop.driver.tokens

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step; None before the first."""
        return self.loop.losses.last

    @property
    def work(self) -> dict[str, int]:
        """Counters of work other than steps; a whole model has none."""
        return {}

    @property
    def coded_on(self) -> str:
        """Where the method's exchanges are coded; nothing if that is the CPU."""
        return self.loop.client.where

    @property
    def unmerged(self) -> bool:
        """False: the rounds of whole models count the work that they take in."""
        return False

    @property
    def twin(self) -> str:
        """The id of a member that sends the same updates as this node; perhaps empty."""
        return self.loop.client.twin

    @property
    def stopping(self) -> bool:
        """True if the loop is to stop."""
        return self.loop.stop.requested

    def stop(self) -> None:
        """Request a stop after the current step; no step waits for a round any more."""
        self.loop.stop()

    def found(self) -> None:
        """Start the run with this model's weights."""
        self.peer.found()
        driver = self.loop.driver
        live_state(driver.method, driver.replica)  # fixes the round's start before any request
        self.loop.state_sync.open()
