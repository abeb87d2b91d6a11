"""CheckFree+'s swap of neighbouring end stages.

Half of the microbatches visit the first two and the last two block stages in the other order, so
that each stage of such a pair learns to stand in for the other, and a lost one can begin as its
partner's copy (Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints",
arXiv:2506.15461).

In the paper the embedding E and the head are stages of their own, and a swapped microbatch visits
E, S2, S1, S3, …, Sn, Sn-1, head. Here the first stage has the embedding besides its layers, the
last one the norm and the head, and every microbatch must begin and end there. So they are the
paper's E and head (with a few layers at best: their exact copies are larger for them), and S1 to Sn
are the stages between:

    swapped    0, 2, 1, 3, …, n, n-1, n+1          with stages 0 to n+1

A layout needs n = 2 block stages (one pair, both first and last) or n ≥ 4 (two pairs; of three the
middle one would be in both), and the same number of layers within a pair. Others are refused as
"swap of unequal stages".

Activation codecs need a common basis at all edges between permuted stages. Codecs that remember an
edge's last sample cannot be used, since a lane's edges differ between its microbatches: `pinned` is
false whatever policy is wrapped.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from farflock.swarm.paths.policy import Microbatch, PathPolicy, ReorderedPaths

RULE = "swap of unequal stages"


class BadSwap(ValueError):
    """These stages cannot be swapped; the message names the rule and the remedy."""


def partners(layers: Sequence[int]) -> dict[int, int]:
    """Map each swapped stage to its partner, given each stage's layers; else raise `BadSwap`."""
    between = len(layers) - 2
    if between < 2:
        raise BadSwap(
            f"{RULE}: only {max(between, 0)} of {len(layers)} stages could change places, as the "
            "first embeds and the last predicts; choose 4 or at least 6 stages, or do not swap"
        )
    if between == 3:
        raise BadSwap(
            f"{RULE}: stage 2 of 5 would be in the first and in the last pair; "
            "choose 4 or at least 6 stages, or do not swap"
        )
    pairs = ((1, 2), (between - 1, between))
    for one, other in pairs:
        if layers[one] != layers[other]:
            raise BadSwap(
                f"{RULE}: stages {one} and {other} have {layers[one]} and {layers[other]} layers; "
                "give them equally many, or do not swap"
            )
    return {here: there for one, other in pairs for here, there in ((one, other), (other, one))}


class SwappedPaths(ReorderedPaths):
    """Any policy, with the swap for exactly n of each 2n consecutive microbatches of a lane's step.

    Without a seed they alternate, over lanes and steps too: with one microbatch a step, every
    second step is swapped. With a seed, chance takes one of each two consecutive microbatches. The
    wrapped policy still chooses the servers, and the stages that it skips stay skipped, by place:
    do not wrap a plan that counts on when a stage is visited.
    """

    def __init__(self, policy: PathPolicy, layers: Sequence[int], seed: int | None = None) -> None:
        super().__init__(policy)
        self._seed = seed
        self._partners = partners(layers)

    def is_swapped(self, microbatch: Microbatch) -> bool:
        """Return whether this microbatch visits stages out of order."""
        turn = microbatch.index % 2
        if self._seed is None:
            return (turn + microbatch.lane + microbatch.step) % 2 == 1
        return turn == _drawn(self._seed, microbatch)

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        order = self._policy.stage_order(microbatch)
        if not self.is_swapped(microbatch):
            return order
        return tuple(self._partners.get(stage, stage) for stage in order)

    def share(self, stage: int) -> Fraction:
        other = self._partners.get(stage, stage)
        return (self._policy.share(stage) + self._policy.share(other)) / 2


def _drawn(seed: int, microbatch: Microbatch) -> int:
    """Return which of a pair of microbatches is swapped, 0 or 1, the same on every machine."""
    words = f"farflock-swap-v1 {seed} {microbatch.step} {microbatch.lane} {microbatch.index // 2}"
    return hashlib.sha256(words.encode()).digest()[0] & 1
