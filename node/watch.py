"""What is watched during a disaster, by records of its own that share no code with what they check.

An update counts at most once, in its own round; members of an exact method are equal after each sync; a mean is the
mean of what its participants sent; tokens add up; no wait lasts without end; memory stays bounded.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.node.courier import Courier
from farflock.node.driver import Driver
from farflock.optimizers.method import Exchange, Result
from farflock.optimizers.state import state_hash
from farflock.swarm.peer import Peer

LONGEST_WAIT_S = 60.0  # overdue: an exchange that is open so long after its deadline while all are reachable
MAX_STORE_BYTES = 4 << 20
MAX_TASKS = 200
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Sent:
    """One peer's contribution to one round, as it was encoded."""

    values: Mapping[str, Tensor]
    weight: float
    tokens: int


@dataclass(slots=True)
class _Feedback:
    """A slow twin of one life's error feedback."""

    residual: dict[str, Tensor]
    message: dict[str, Tensor]


class Watch:
    """Collects what all peers do, and the violations."""

    def __init__(self, arm: str, peers: Sequence[str]) -> None:
        self._exact = arm != "noloco"
        self._peers = peers
        self._sent: dict[tuple[str, int], dict[tuple[str, int], _Sent]] = {}  # by stream and round, then peer and life
        self._hashes: dict[tuple[str, int], dict[bytes, str]] = {}
        self._applied: set[tuple[int, int, str, int]] = set()
        self._closes: dict[int, tuple[Any, ...]] = {}
        self._counted: Counter[tuple[str, int]] = Counter()
        self._trained: Counter[tuple[str, int]] = Counter()
        self._times: list[float] = []
        self._feedback: dict[tuple[str, int], _Feedback] = {}
        self.calm_until_s = 0.0  # only a death has happened: until then no round may fail
        self.violations: list[str] = []

    def violate(self, what: str) -> None:
        """Note a violation, at most 20 of them."""
        if len(self.violations) < 20:
            self.violations.append(what)

    @property
    def rounds(self) -> int:
        """Rounds that somebody applied."""
        return len(self._hashes)

    def rounds_since_repair(self, since_s: float) -> int:
        """Applied rounds after a moment."""
        return sum(moment >= since_s for moment in self._times)

    def digest(self) -> str:
        """One hash for all that happened: equal for two runs of one seed."""
        text = repr((self._times, sorted((key, sorted(hashes)) for key, hashes in self._hashes.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    # what the harness tells

    def courier(self, peer: Peer, index: int, birth: int, driver: Driver, inner: Courier) -> Courier:
        """The same courier, with every exchange noted on its way out and every result on its way in."""
        watch = self
        carry, replay = inner.carry, inner.replay

        async def noted_carry(exchange: Exchange, tokens: int, state: bytes) -> Result:
            place = watch._sent.setdefault((exchange.key.stream, exchange.key.round), {})
            if (peer.me, birth) in place:
                watch.violate(f"peer {index} offered {exchange.key} twice: a round key was used again")
            place[peer.me, birth] = sent = _Sent(_decoded(exchange), exchange.weight, tokens)
            watch._check_feedback(index, (peer.me, birth), driver, exchange)
            result = await carry(exchange, tokens, state)
            watch._check_result(index, exchange.key.stream, exchange.key.round, result)
            watch._settle_feedback((peer.me, birth), sent, result)
            return result

        def noted_replay(stream: str, round_number: int) -> Result | None:
            result = replay(stream, round_number)
            if result is not None:
                watch._check_result(index, stream, round_number, result)
            return result

        inner.carry, inner.replay = noted_carry, noted_replay  # type: ignore[method-assign]
        return inner

    def reported(self, index: int, birth: int, driver: Driver, kind: str, fields: Mapping[str, Any]) -> None:
        """A node's own report: after each applied round, members of an exact method are compared."""
        if kind == "step":
            self._trained[self._peers[index], birth] += 10
        if kind == "adopt":  # a snapshot replaces the state, and with it the residual
            self._feedback.pop((self._peers[index], birth), None)
        if kind != "round":
            return
        stream, number = fields["stream"], fields["round"]
        once = (index, birth, stream, number)
        if once in self._applied:
            self.violate(f"peer {index} applied round {number} of {stream} twice")
        self._applied.add(once)
        self._times.append(asyncio.get_running_loop().time())
        key = (stream, number)
        if self._exact and fields["status"] == "failed" and self._times[-1] < self.calm_until_s:
            self.violate(f"round {number} of {stream} failed although only a peer had died")
        digest = state_hash(driver.method.snapshot(driver.replica)) if self._exact else str(key).encode()
        hashes = self._hashes.setdefault(key, {})
        hashes.setdefault(digest, f"peer {index}")
        if len(hashes) > 1:
            self.violate(f"states differ after round {number} of {stream}: {sorted(hashes.values())}")

    def killed(self, index: int) -> None:
        """A peer died; what it had sent may still count."""

    # checks

    def _check_result(self, index: int, stream: str, number: int, result: Result) -> None:
        if result.status == "failed" or result.mean is None:
            return
        sent = self._sent.get((stream, number), {})
        by_peer: dict[str, list[_Sent]] = {}
        for (peer, _), entry in sent.items():
            by_peer.setdefault(peer, []).append(entry)
        missing = [peer for peer in result.participants if peer not in by_peer]
        if missing:
            self.violate(f"round {number} of {stream} counts {missing}, who sent nothing to it")
            return
        if all(len(by_peer[peer]) == 1 for peer in result.participants):
            entries = [by_peer[peer][0] for peer in result.participants]
            self._check_mean(index, stream, number, result, entries)
            if self._exact:
                self._check_tokens(number, result, entries)

    def _check_mean(self, index: int, stream: str, number: int, result: Result, entries: list[_Sent]) -> None:
        """The mean is the weighted mean of what its participants sent, within the return codec's rounding."""
        assert result.mean is not None
        total = sum(entry.weight for entry in entries)
        for name, mean in result.mean.items():
            shares = [entry.values[name].double() * (entry.weight / total) for entry in entries]
            expected = torch.stack(shares).sum(dim=0)
            largest = max(float(entry.values[name].abs().max()) for entry in entries)
            error = float((mean.double() - expected).abs().max())
            if error > TOLERANCE + largest / 100:
                self.violate(f"peer {index}: the mean of {name} in round {number} of {stream} is off by {error:.4f}")

    def _check_tokens(self, number: int, result: Result, entries: list[_Sent]) -> None:
        """Tokens after a round are those before it and those of its participants; all peers say the same."""
        now = (result.participants, result.tokens)
        known = self._closes.setdefault(number, now)
        if known != now:
            self.violate(f"round {number} ended as {known} for one and as {now} for another")
        before = self._closes.get(number - 1)
        if before is not None and before[1] + sum(entry.tokens for entry in entries) != result.tokens:
            self.violate(
                f"round {number} has {result.tokens} tokens after {before[1]} and {[e.tokens for e in entries]}"
            )

    def _check_feedback(self, index: int, life: tuple[str, int], driver: Driver, exchange: Exchange) -> None:
        """A message is beta·e + (phi - theta), with the residual e of the twin."""
        beta = getattr(driver.method, "feedback", None)
        if beta is None:
            return
        replica = driver.replica
        theta, phi = replica.read(replica.names, "param"), driver.method.eval_params(replica)
        twin = self._feedback.setdefault(life, _Feedback({}, {}))
        for name, message in exchange.tensors.items():
            kept = twin.residual.get(name, torch.zeros_like(message))
            error = float((beta * kept + (phi[name] - theta[name]) - message).abs().max())
            if error > TOLERANCE:
                self.violate(f"peer {index}: the feedback in {name} of {exchange.key} is off by {error:.4f}")
        twin.message = {name: message.clone() for name, message in exchange.tensors.items()}

    def _settle_feedback(self, life: tuple[str, int], sent: _Sent, result: Result) -> None:
        """Where the message was taken, the residual is what it held beyond what was delivered."""
        twin = self._feedback.get(life)
        for name in twin.message if twin is not None and result.status != "failed" else ():
            assert twin is not None
            if result.taken.get(name):
                twin.residual[name] = twin.message[name] - sent.values[name]

    def check_end(self, peers: Sequence[Peer]) -> None:
        """At the end: no endless wait, no growing memory, no more tokens counted than trained."""
        for peer in peers:
            for wait in peer.waits():
                if wait.left_s < -LONGEST_WAIT_S:
                    self.violate(f"{peer.me[-6:]} waits for {wait.what} since {-wait.left_s:.0f} s after its deadline")
            if peer.port.store.size_bytes > MAX_STORE_BYTES:
                self.violate(f"{peer.me[-6:]} holds {peer.port.store.size_bytes} bytes of chunks")
            if len(peer._tasks) > MAX_TASKS:
                self.violate(f"{peer.me[-6:]} has {len(peer._tasks)} tasks")
        if self._exact and self._closes:
            agreed, trained = self._closes[max(self._closes)][1], sum(self._trained.values())
            if agreed > trained:
                self.violate(f"{agreed} tokens are counted, {trained} were trained")


def _decoded(exchange: Exchange) -> dict[str, Tensor]:
    """What the others decode of an exchange's tensors, each tensor encoded alone."""
    spec = codec(exchange.codec)
    decoded = {}
    for name, tensor in exchange.tensors.items():
        out, payload = torch.empty(tensor.numel()), bytearray()
        spec.encode(tensor.reshape(-1).contiguous(), Context(), payload)
        spec.decode(payload, Context(), out)
        decoded[name] = out.reshape(tensor.shape)
    return decoded
