"""Gradients that a stage server has computed and that do not count yet, with the replies that their
trainers got."""

import asyncio
from dataclasses import dataclass

from farflock.node.pipeline.passes.stage import MicrobatchGradient
from farflock.swarm.peer.call_server import CallReply
from farflock.swarm.protocol.gradient_leases import Begin, GradientKey, GradientLeases


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """What one microbatch asks of a stage's weights; its loss, in nats, summed over tokens, which
    the last stage knows; and the round of the weights that it is of."""

    staged: MicrobatchGradient
    loss_sum: float | None
    round: int


class PendingGradients:
    """The table of backward passes that run and of gradients that wait for their confirmation
    (swarm/protocol/gradient_leases.py).

    `replies` has one future for each of them: a request that is repeated gets the reply of the
    first."""

    def __init__(self, staging: GradientLeases) -> None:
        self.staging = staging
        self.gradients: dict[GradientKey, PendingGradient] = {}
        self.replies: dict[GradientKey, asyncio.Future[CallReply]] = {}

    def begin(self, key: GradientKey, attempt: int, reply: asyncio.Future[CallReply]) -> Begin:
        """Ask for a backward pass: `run` it, which resolves `reply`; answer `again` what `replies`
        has; or say `busy`. There is `nothing` to be done for a gradient that counts already or was
        given up."""
        begun = self.staging.begin(key, attempt)
        if begun == "run":
            self.replies[key] = reply
        elif begun == "nothing" and key in self.replies:
            return "again"
        return begun

    def drop(self, key: GradientKey, attempt: int) -> None:
        """Forget a pass that brought nothing; it may be asked for again."""
        self.staging.revoke(key, attempt)
        self.replies.pop(key, None)

    def put_aside(self, key: GradientKey, gradient: PendingGradient, now_s: float) -> int | None:
        """Keep what a pass brought until it is confirmed. Returns the attempt to answer, None if
        nobody wants it any more."""
        attempt = self.staging.staged(key, now_s)
        if attempt is None:
            self.replies.pop(key, None)
        else:
            self.gradients[key] = gradient
        return attempt

    def confirm(self, key: GradientKey, attempt: int) -> PendingGradient | bool:
        """Confirm a gradient: it is handed out, to be merged now. True if it was merged before,
        False if it is not here."""
        match self.staging.confirm(key, attempt):
            case "unknown":
                self._forget_unwanted()
                return False
            case "merged":
                return True
            case "merge":
                self.replies.pop(key, None)
                return self.gradients.pop(key)

    def revoke(self, key: GradientKey, attempt: int) -> None:
        """Give up what was asked for up to this attempt: another server does it."""
        self.staging.revoke(key, attempt)
        self._forget_unwanted()

    def expire(self, now_s: float) -> None:
        """Give up what was not confirmed in time."""
        self.staging.expire(now_s)
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        """Drop the gradients that no confirmation can merge any more."""
        for key in [key for key in self.gradients if key not in self.staging.kept]:
            del self.gradients[key]
            self.replies.pop(key, None)
