"""The seam between a stage server and its weight versions: it gives a pass's weights and a
gradient's delay.

A server that waits for its rounds has one version. In a pipeline that does not wait
(docs/decisions/016), a forward pass states the version it used and the backward pass names it,
so that any server of the stage differentiates the same function. A gradient's delay is the
number of rounds applied between its weights and the round that it goes into. For such a
pipeline, the assembly passes in kept versions (node/pipeline/contrib/kept_versions.py)."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from farflock.node.pipeline.passes.requests import Version
from farflock.optimizers.method import State
from farflock.optimizers.parts.state import state_hash

MissingReason = Literal["ahead", "gone", "late"]

ORIGIN = "origin"  # name of a state mark (node/train/state_sync.py)


class MissingVersion(LookupError):
    """The version that a request names is not here; the reason is what `lack` returns."""

    def __init__(self, lack: MissingReason) -> None:
        super().__init__(f"the requested version of the weights is not here: {lack}")
        self.lack = lack


class WeightVersions:
    """The versions of one stage's weights at one server, by the rounds in them. This class has a
    single version, the stage's own weights: passes name none, and no gradient is late.

    Law:

    1. Inside `using(version)` the stage computes, and is differentiated, with exactly the weights
       of that version; outside the block, with its own. Two servers of a stage that both have a
       version have the same weights for it, bit for bit.
    2. `using` raises `MissingVersion` exactly where `lack` names a reason, unless the weights
       change between the two.
    3. A round is `begin_round`, then the change of the weights, then `end_round`; a local step
       begins with `begin_step`. Only the compute thread calls these and `using`, never inside a
       `using` block. `lack` and `delay` change nothing and may be called on the event loop.
    4. `delay` is 0 for gradients of the weights that the round changes. It does not fall as
       `number` grows."""

    @contextmanager
    def using(self, version: Version | None) -> Iterator[Version | None]:
        """Compute with these weights inside the block (None: the newest); raise `MissingVersion` if
        they are not here. Yield the version for the reply, None where passes name none."""
        yield None

    def lack(self, version: Version) -> MissingReason | None:
        """Return why a version is not here (ahead, gone, or too late for any use), or None."""
        return None

    def delay(self, weights: int, number: int, stepped: int | None = None) -> int:
        """Return how many rounds late a gradient of the weights of round `weights` is for round
        `number`. `stepped` is the last round in the weights when a step took the gradient, or
        None if no step has taken it yet."""
        return 0

    def begin_step(self, ages: Collection[int]) -> None:
        """Note that a step is about to take in gradients of weights this many rounds old."""

    def begin_round(self, ages: Collection[int]) -> None:
        """Note that a round with gradients this many rounds late is about to change the weights."""

    def end_round(self) -> None:
        """Note that the round has changed the weights."""


def origin_of(state: State) -> int:
    """Return a number for the state with which a stage starts over.

    Rounds of the stage's former weights have the same round numbers, but belong to other
    versions."""
    return int.from_bytes(state_hash(state)[:7], "little")
