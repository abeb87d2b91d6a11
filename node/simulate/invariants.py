"""Invariants of a disaster, checked by bookkeeping that shares no code with what it checks.

An update counts at most once, and in its own round; members of an exact method are equal after each
sync; a mean is the mean of its participants' contributions, the same bits for all of them; tokens
add up, life by life; every wait has a name and a deadline, and no wait lasts long after its
deadline; what a peer holds stays small.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.node.loop import Loop
from farflock.node.simulate.memory_audit import longest
from farflock.node.train.driver import Claim, Driver, EncodedExchange
from farflock.node.train.exchange_client import ExchangeClient
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.method import Exchange, ExchangeKey, Result, State, Tensors
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.exchange.streams import RoundOutcome

DEADLINE_S = 6.0  # of an exchange
TOKENS_PER_STEP = 10
STORE_BYTES = 2048  # limit of unneeded chunks: a few rounds' worth, so that peers must drop some
MAX_STORE_BYTES = STORE_BYTES + 6144  # with the chunks of open exchanges and of the log
MAX_TASKS = 60  # per peer
MAX_ITEMS = 160  # per table, list or queue: such a store holds about 120 of the smallest chunks
OVERDUE_S = DEADLINE_S  # by which a wait may outlast its deadline once the network has healed
TOLERANCE = 1e-3

LifeId = tuple[str, int]  # a peer, and its life's number
RoundId = tuple[str, int]  # a stream, and a round's number
RoundIds = tuple[RoundId, ...]  # each stream's last round in a state


@dataclass(frozen=True, slots=True)
class _Sent:
    """One peer's contribution to one round, as others decode it."""

    values: Mapping[str, Tensor]
    weight: float
    tokens: int


@dataclass(slots=True)
class _Feedback:
    """A slow reference for one life's error feedback."""

    residual: dict[str, Tensor]
    message: dict[str, Tensor]


class InvariantChecker:
    """A record of what all peers do, and of the violations."""

    def __init__(self, arm: str, peers: Sequence[str]) -> None:
        self._equality, self._pairs_only = METHODS[arm].equality, arm == "noloco"
        self._peers = peers
        self._sent: dict[RoundId, dict[LifeId, _Sent]] = {}
        self._hashes: dict[RoundIds, dict[bytes, str]] = {}
        # for close methods: the state of the first peer that applied these rounds
        self._states: dict[RoundIds, State] = {}
        # as the first participant decoded them
        self._means: dict[tuple[RoundId, tuple[str, ...]], Tensors] = {}
        self._pairs: dict[tuple[RoundId, str], tuple[str, ...]] = {}
        self._applied: set[tuple[LifeId, RoundId]] = set()  # rounds in each life's state
        self._rounds: set[RoundId] = set()
        self._closes: dict[RoundId, tuple[tuple[str, ...], int]] = {}  # participants, agreed tokens
        self._counted: dict[RoundId, Mapping[LifeId, int]] = {}  # tokens in close lists
        self._credit: Counter[LifeId] = Counter()  # the same of all rounds
        self._trained: Counter[LifeId] = Counter()
        self._times: list[tuple[float, str, str]] = []  # applied rounds: time, peer, stream
        self._feedback: dict[LifeId, _Feedback] = {}
        self.statuses: Counter[str] = Counter()  # of applied rounds
        self.calm_until_s = 0.0  # until then the only fault is one death, and no round may fail
        self.violations: list[str] = []

    def violate(self, what: str) -> None:
        """Record a violation, at most 20 in all."""
        if len(self.violations) < 20:
            self.violations.append(what)

    @property
    def rounds(self) -> int:
        """The number of rounds that any peer applied."""
        return len(self._rounds)

    def rounds_since(self, since_s: float) -> dict[str, Counter[str]]:
        """Return, by peer, how many rounds of each stream it has applied since `since_s`."""
        counts = {peer: Counter[str]() for peer in self._peers}
        for _, peer, stream in (entry for entry in self._times if entry[0] >= since_s):
            counts[peer][stream] += 1
        return counts

    def digest(self) -> str:
        """Return a hash of all that happened: equal for two runs of one seed."""
        text = repr(
            (self._times, sorted((key, sorted(hashes)) for key, hashes in self._hashes.items()))
        )
        return hashlib.sha256(text.encode()).hexdigest()

    # rounds and lives

    def place(self, life: LifeId, stream: str, number: int) -> RoundId:
        """Return the name of a round as this life knows it."""
        return stream, number

    def is_again(self, life: LifeId, key: RoundId) -> bool:
        """True if a life has offered this round before."""
        return life in self._sent.get(key, {})

    def counted_of(
        self, life: LifeId, key: RoundId, peer: str, sent: Collection[LifeId]
    ) -> LifeId | None:
        """Return the life in which a participant counts in a round, of those that have `sent` to
        it; None if there were several, of which the view decides."""
        lives = [each for each in sent if each[0] == peer]
        return lives[0] if len(lives) == 1 else None

    # events

    def exchange_client(
        self, peer: Peer, index: int, birth: int, driver: Driver, inner: ExchangeClient
    ) -> ExchangeClient:
        """Return the same client, changed to record each exchange that it encodes and each
        result that it decodes."""
        encode, decode, life = inner.encode, inner.decode, (peer.me, birth)

        def noted_encode(exchange: Exchange, claim: Claim) -> EncodedExchange:
            key_of_round = (exchange.key.stream, exchange.key.round)
            if self.is_again(life, key_of_round):
                self.violate(f"peer {index} offered {exchange.key} twice: the key was used again")
            lives = self._sent.setdefault(key_of_round, {})
            lives[life] = _Sent(_decoded(exchange), exchange.weight, claim.tokens)
            self._check_feedback(index, life, driver, exchange)
            return encode(exchange, claim)

        def noted_decode(
            key: ExchangeKey, outcome: RoundOutcome, payloads: Sequence[bytes] = ()
        ) -> Result:
            result = decode(key, outcome, payloads)
            self._check_result(index, life, (key.stream, key.round), result)
            if payloads:
                self._settle_feedback(life, self._sent[key.stream, key.round][life], result)
            return result

        inner.encode, inner.decode = noted_encode, noted_decode  # type: ignore[method-assign]
        return inner

    def reported(
        self,
        index: int,
        birth: int,
        driver: Driver,
        kind: str,
        fields: Mapping[str, Any],
        rounds: Mapping[str, int] | None = None,
    ) -> None:
        """Record a node's report. After each applied round, compare its state with those of
        others that have applied the same `rounds`, by stream."""
        life, now_s = (self._peers[index], birth), asyncio.get_running_loop().time()
        if kind == "step":
            self._trained[life] += TOKENS_PER_STEP
        if kind == "adopt":  # a snapshot replaces the state, its residual and its rounds
            self._feedback.pop(life, None)
            self._applied = {entry for entry in self._applied if entry[0] != life}
        if kind != "round":
            return
        stream, number = fields["stream"], fields["round"]
        key = self.place(life, stream, number)
        if (life, key) in self._applied:
            self.violate(f"peer {index} applied round {number} of {stream} twice")
        self._applied.add((life, key))
        self._rounds.add(key)
        self._times.append((now_s, life[0], stream))
        self.statuses[fields["status"]] += 1
        if not self._pairs_only and fields["status"] == "failed" and now_s < self.calm_until_s:
            self.violate(f"round {number} of {stream} failed although only one peer had died")
        self.compare(index, life, driver, rounds or {stream: number})

    def compare(self, index: int, life: LifeId, driver: Driver, last: Mapping[str, int]) -> None:
        """Require equal states after equal rounds, of which `last` are each stream's last ones: bit
        for bit for exact methods, nearly for close ones."""
        rounds = tuple(sorted(self.place(life, stream, last[stream]) for stream in last))
        if self._equality == "per-peer":
            self._hashes.setdefault(rounds, {})
            return
        state = driver.method.snapshot(driver.replica)
        hashes = self._hashes.setdefault(rounds, {})
        hashes.setdefault(state_hash(state), f"peer {index}")
        near = len(hashes) == 1
        if self._equality == "close":
            near = _near(state, self._states.setdefault(rounds, state))
        if not near:
            peers = sorted(hashes.values())
            self.violate(f"states differ after {named(*rounds)}: {peers}")

    def look(self, peer: Peer) -> None:
        """Check that what a peer holds is bounded and that its waits have deadlines and names."""
        name, now_s = peer.me[-6:], peer.context.now()
        for wait in peer.waits():
            if not wait.left_s <= DEADLINE_S:
                self.violate(
                    f"{name} waits for {wait.what} for {wait.left_s:.1f} s, "
                    "beyond the deadline of an exchange"
                )
            if peer.me in wait.whom:
                self.violate(f"{name} waits for itself in {wait.what}")
        size_bytes = peer.context.store.size_bytes
        if size_bytes > MAX_STORE_BYTES:
            self.violate(
                f"{name} holds {size_bytes} bytes of chunks at {now_s:.1f} s, above "
                f"{MAX_STORE_BYTES}"
            )
        tasks = len(peer.tasks)
        if tasks > MAX_TASKS:
            self.violate(f"{name} has {tasks} tasks at {now_s:.1f} s, above {MAX_TASKS}")

    def check_memory(self, peer: Peer) -> None:
        """Check that nothing a peer holds has grown long. This is slow, as it looks everywhere."""
        count, way = longest(peer)
        if count > MAX_ITEMS:
            name, now_s = peer.me[-6:], peer.context.now()
            self.violate(f"{name} holds {count} items in {way} at {now_s:.1f} s, above {MAX_ITEMS}")

    # checks

    def _check_result(self, index: int, life: LifeId, key: RoundId, result: Result) -> None:
        if result.status == "failed" or result.mean is None:
            return
        sent, place = self._sent.get(key, {}), self.place(life, *key)
        missing = set(result.participants) - {peer for peer, _ in sent}
        if missing:
            self.violate(f"{named(place)} counts {sorted(missing)}, which sent nothing to it")
            return
        self._check_pair(place, result.participants)
        lives = [self.counted_of(life, key, peer, sent) for peer in result.participants]
        counted = {each: sent[each] for each in lives if each is not None}
        if len(counted) < len(lives):
            return
        known = self._means.setdefault((place, result.participants), result.mean)
        if known is result.mean:
            self._check_mean(index, place, result, list(counted.values()))
        elif any(not torch.equal(known[name], mean) for name, mean in result.mean.items()):
            self.violate(f"peer {index} has another mean in {named(place)} than other participants")
        self._check_gathered(index, place, result, sent)
        if not self._pairs_only:
            before = self.place(life, key[0], key[1] - (result.next_round - key[1]))
            self._check_tokens(place, before, result, counted)

    def _check_pair(self, key: RoundId, participants: tuple[str, ...]) -> None:
        """In pairs, a contribution counts with one partner only."""
        for peer in participants if self._pairs_only and len(participants) == 2 else ():
            known = self._pairs.setdefault((key, peer), participants)
            if known != participants:
                self.violate(
                    f"{named(key)}: {peer} counts in the pair {known} and in {participants}"
                )

    def _check_mean(self, index: int, key: RoundId, result: Result, entries: list[_Sent]) -> None:
        """Require the participants' weighted mean, within the return codec's rounding."""
        assert result.mean is not None
        total = sum(entry.weight for entry in entries)
        for name, mean in result.mean.items():
            shares = [entry.values[name].double() * (entry.weight / total) for entry in entries]
            expected = torch.stack(shares).sum(dim=0)
            largest = max(float(entry.values[name].abs().max()) for entry in entries)
            error = float((mean.double() - expected).abs().max())
            if error > TOLERANCE + largest / 100:
                self.violate(
                    f"peer {index}: the mean of {name} in {named(key)} is off by {error:.4f}"
                )

    def _check_gathered(
        self, index: int, key: RoundId, result: Result, sent: Mapping[LifeId, _Sent]
    ) -> None:
        """Require tensors gathered from a participant to equal those that one of its lives sent."""
        for who, tensors in (result.gathered or {}).items():
            lives = [entry.values for life, entry in sent.items() if life[0] == who]
            matches = (
                all(torch.equal(values[name], x) for name, x in tensors.items()) for values in lives
            )
            if not any(matches):
                self.violate(
                    f"peer {index} has gathered tensors of {who} that it never sent in {named(key)}"
                )

    def _check_tokens(
        self, key: RoundId, before: RoundId, result: Result, counted: Mapping[LifeId, _Sent]
    ) -> None:
        """Tokens after a round are those after the one before plus its participants'; all peers
        agree on them, and no life's tokens count more often than it has trained them."""
        now = (result.participants, result.tokens)
        known = self._closes.get(key)
        if known is not None:
            if known != now:
                self.violate(f"{named(key)} ended as {known} for one and as {now} for another")
            return
        self._closes[key] = now
        mine = {life: entry.tokens for life, entry in counted.items()}
        last = self._closes.get(before)
        if last is not None and last[1] + sum(mine.values()) != result.tokens:
            self.violate(
                f"{named(key)} has {result.tokens} tokens after {last[1]} and {list(mine.values())}"
            )
        self._counted[key] = mine
        self._credit.update(mine)
        for life in mine:
            tokens, trained = self._credit[life], self._trained[life]
            if tokens > trained:
                self.violate(f"{tokens} tokens of {life} count, but it has trained {trained}")

    def _check_feedback(
        self, index: int, life: tuple[str, int], driver: Driver, exchange: Exchange
    ) -> None:
        """Require the message to be beta·e + (phi - theta), where e is the reference's residual.
        Delayed steps are skipped, as theta has moved on by then."""
        beta = getattr(driver.method, "feedback", None)
        if beta is None or exchange.apply_after:
            return
        replica = driver.replica
        theta, phi = replica.read(replica.names, "param"), driver.method.eval_params(replica)
        twin = self._feedback.setdefault(life, _Feedback({}, {}))
        for name, message in exchange.tensors.items():
            kept = twin.residual.get(name, torch.zeros_like(message))
            error = float((beta * kept + (phi[name] - theta[name]) - message).abs().max())
            if error > TOLERANCE:
                self.violate(
                    f"peer {index}: the feedback in {name} of {exchange.key} is off by {error:.4f}"
                )
        twin.message.update({name: message.clone() for name, message in exchange.tensors.items()})

    def _settle_feedback(self, life: tuple[str, int], sent: _Sent, result: Result) -> None:
        """Set the residual of a message that was taken to its undelivered part."""
        twin = self._feedback.get(life)
        for name in sent.values if twin is not None and result.status != "failed" else ():
            assert twin is not None
            if result.taken.get(name):
                twin.residual[name] = twin.message[name] - sent.values[name]

    def check_waits(self, peer: Peer, loop: Loop) -> None:
        """Check, after the network has healed, that no wait is long overdue or without a name."""
        named = {(wait.what.stream, wait.what.round) for wait in peer.waits()}
        for pending in loop.driver.table:
            key, age_s = pending.exchange.key, peer.run_s() - pending.since_s
            exchanging = loop.under_way.get(key)
            if exchanging is None or exchanging.done():
                continue  # the result has arrived and is applied after this step
            if age_s > pending.exchange.deadline_s + OVERDUE_S:
                self.violate(f"{peer.me[-6:]} has waited for {key} for {age_s:.1f} s")
            if age_s > OVERDUE_S and (key.stream, key.round) not in named:
                self.violate(f"{peer.me[-6:]} has waited for {key} for {age_s:.1f} s, unnamed")


def named(*rounds: RoundId) -> str:
    """Return a phrase for these rounds."""
    return " and ".join(f"round {number} of {stream}" for stream, number in rounds)


def _near(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(x, other[name], 0.0, TOLERANCE) for name, x in one.items()
    )


def _decoded(exchange: Exchange) -> dict[str, Tensor]:
    """Return an exchange's tensors as other peers decode them, each encoded separately."""
    if exchange.codec == "fp32":
        return {name: tensor.clone() for name, tensor in exchange.tensors.items()}
    spec = codec(exchange.codec)
    decoded = {}
    for name, tensor in exchange.tensors.items():
        out, payload = torch.empty(tensor.numel(), dtype=torch.float32), bytearray()
        spec.encode(tensor.reshape(-1).contiguous(), Context(), payload)
        spec.decode(payload, Context(), out)
        decoded[name] = out.reshape(tensor.shape)
    return decoded
