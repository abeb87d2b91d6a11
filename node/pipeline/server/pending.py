"""Gradients that a stage server has computed but not yet seen confirmed, and the replies to
their requests."""

import asyncio
from dataclasses import dataclass

from farflock.node.pipeline.passes.stage import MicrobatchGradient
from farflock.swarm.peer.calls.call_server import CallReply
from farflock.swarm.protocol.gradient_leases import Begin, GradientKey, GradientLeases


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """One microbatch's gradient, its loss in nats summed over tokens (None except at the last
    stage), and the round of its weights."""

    staged: MicrobatchGradient
    loss_sum: float | None
    round: int


class PendingGradients:
    """The running backward passes and unconfirmed gradients (swarm/protocol/gradient_leases.py).

    `replies` has a future for each, so that a repeated request gets the reply to the first one."""

    def __init__(self, staging: GradientLeases) -> None:
        self.staging = staging
        self.gradients: dict[GradientKey, PendingGradient] = {}
        self.replies: dict[GradientKey, asyncio.Future[CallReply]] = {}

    def begin(self, key: GradientKey, attempt: int, reply: asyncio.Future[CallReply]) -> Begin:
        """Register a backward pass and return the next action: `run` it and resolve `reply`; answer
        `again` from `replies`; refuse as `busy`; or do `nothing`, because the gradient already
        counts or was given up."""
        begun = self.staging.begin(key, attempt)
        if begun == "run":
            self.replies[key] = reply
        elif begun == "nothing" and key in self.replies:
            return "again"
        return begun

    def drop(self, key: GradientKey, attempt: int) -> None:
        """Forget a pass that produced no gradient, so that it may be requested again."""
        self.staging.revoke(key, attempt)
        self.replies.pop(key, None)

    def put_aside(self, key: GradientKey, gradient: PendingGradient, now_s: float) -> int | None:
        """Keep a gradient until it is confirmed. Return the attempt to answer with, or None if
        it was revoked."""
        attempt = self.staging.staged(key, now_s)
        if attempt is None:
            self.replies.pop(key, None)
        else:
            self.gradients[key] = gradient
        return attempt

    def confirm(self, key: GradientKey, attempt: int) -> PendingGradient | bool:
        """Confirm a gradient. Return it if it must be merged now, True if it was merged before,
        False if this server does not have it."""
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
        """Give up attempts up to this one, because another server computes the gradient."""
        self.staging.revoke(key, attempt)
        self._forget_unwanted()

    def expire(self, now_s: float) -> None:
        """Give up gradients that were not confirmed in time."""
        self.staging.expire(now_s)
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        """Drop gradients that can no longer be confirmed."""
        for key in [key for key in self.gradients if key not in self.staging.kept]:
            del self.gradients[key]
            self.replies.pop(key, None)
