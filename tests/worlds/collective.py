"""One exchange of a group, machine against machine: a bag of messages, a shared world of chunks,
and bad luck."""

import collections
import hashlib
import heapq
import itertools
import json
import random

import msgspec

from farflock.swarm.messages import Key, Offer
from farflock.swarm.protocol.exchange.actions import Fetch, Reduce
from farflock.swarm.protocol.exchange.bundles import BundleCut
from farflock.swarm.protocol.exchange.close_list import (
    RoundTerms,
    decode_close_list,
    last_bundles,
)
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.quorum import is_quorum

KEY, VIEW = Key("weights", 3), bytes(32)
DEADLINE_S = 20.0
TICK_S = 0.1
PRIOR_TOKENS = 1000
STATE, OTHER_STATE = b"s" * 32, b"t" * 32


TERMS = RoundTerms("mean", 2, DEADLINE_S)


def one_shard_each(terms):
    """Return the terms with a bundle per shard, as few shards as there are."""
    object.__setattr__(terms, "cut", BundleCut(terms.shards, terms.shards))
    return terms


def digest_of(content):
    return hashlib.sha256(content).digest()


def mask(*members):
    return sum(1 << member for member in members).to_bytes(8, "little")


def contribution(member, bundle, *, broken=False):
    return json.dumps({"of": member, "bundle": bundle, "broken": broken}).encode()


class ExchangeWorld:
    """`n` machines in virtual time. Chunks are JSON that says whose contributions are in them,
    so that a result can be checked against its mask. Of the `n` machines the last `voters` only
    vote."""

    def __init__(
        self,
        seed,
        n=3,
        kind="mean",
        bundles=3,
        *,
        loss=0.0,
        deadline_s=DEADLINE_S,
        voters=0,
        witnessed=False,
        trip_s=0.2,
    ):
        self.chance = random.Random(seed)
        self.n, self.bundles, self.loss, self.trip_s = n, bundles, loss, trip_s
        # of a trip: a long line varies less
        self.waits = (0.05, 1.0) if trip_s < 1 else (0.8, 1.0)
        kinds = {"uniform": kind == "uniform", "witnessed": witnessed}
        self.terms = RoundTerms(
            "gather" if kind == "gather" else "mean", bundles, deadline_s, **kinds
        )
        one_shard_each(self.terms)
        self.now_s, self.serial = 0.0, itertools.count()
        self.queue = []
        self.content = {}
        self.holds = [set() for _ in range(n)]
        self.crashed = {}
        self.handled = collections.Counter()  # events by member
        self.crash_after = {}  # member: events
        self.dies_with = {}
        self.sent = collections.Counter()
        self.sent_bytes = 0
        self.offered = {}
        self.broken = set()
        self.finished_s = {}
        self.flapping = 0.0
        self.contributors = range(n - voters)
        order, others = list(self.contributors), list(range(n - voters, n))
        self.chance.shuffle(order)
        self.chance.shuffle(others)
        peers = tuple(f"peer{member}" for member in range(n))
        self.machines = [
            Collective(
                KEY,
                VIEW,
                Roster(peers, me, (*order, *others), tuple(order)),
                self.terms,
                0.0,
                PRIOR_TOKENS,
                lambda bundle, digest, here=self.holds[me]: digest in here,
            )
            for me in range(n)
        ]
        for me in range(n):
            self.at(TICK_S * (1 + me / n), self.tick, me)

    # what happens

    def at(self, when_s, what, *args):
        heapq.heappush(self.queue, (when_s, next(self.serial), what, args))

    def offer_at(self, when_s, me, *, state=STATE, weight=1.0, broken=False):
        self.at(when_s, self.offer, me, state, weight, broken)

    def offer(self, me, state, weight, broken):
        bundles = [contribution(me, bundle, broken=broken) for bundle in range(self.bundles)]
        digests = tuple(self.keep(me, bundle) for bundle in bundles)
        sizes = tuple(len(bundle) for bundle in bundles)
        if broken:
            self.broken.add(me)
        self.offered[me] = (state, weight)
        self.event(
            me, self.machines[me].offer, Offer(KEY, VIEW, digests, sizes, weight, 10 + me, state)
        )

    def crash(self, me):
        self.crashed.setdefault(me, self.now_s)
        if me in self.dies_with:
            self.crashed.setdefault(self.dies_with[me], self.now_s)

    def event(self, me, what, *args, **options):
        if me in self.crashed:
            return
        what(self.now_s, *args, **options)
        self.carry_out(me)
        self.handled[me] += 1
        if self.crash_after.get(me) == self.handled[me]:
            self.crash(me)

    def tick(self, me):
        if me in self.crashed:
            return
        noticed = {peer for peer, when_s in self.crashed.items() if self.now_s - when_s >= 1.0}
        flapping = {peer for peer in range(self.n) if self.chance.random() < self.flapping}
        self.event(me, self.machines[me].tick, frozenset(noticed | flapping))
        self.at(self.now_s + TICK_S, self.tick, me)

    def carry_out(self, me):
        while actions := self.machines[me].take():
            for action in actions:
                self.act(me, action)
        if self.machines[me].complete:
            self.finished_s.setdefault(me, self.now_s)

    def act(self, me, action):
        match action:
            case Fetch():
                wait_s = self.chance.uniform(0.1, 1.0) * self.trip_s
                self.at(self.now_s + wait_s, self.fetch, me, action, self.now_s + 10.0)
            case Reduce():
                self.at(self.now_s + self.chance.uniform(0.0, 0.1), self.reduce, me, action)
            case (to, message):
                self.sent[type(message).__name__] += 1
                self.sent_bytes += len(msgspec.msgpack.encode(message))
                if self.chance.random() >= self.loss:
                    wait_s = self.chance.uniform(*self.waits) * self.trip_s
                    self.at(self.now_s + wait_s, self.arrive, to, me, message)
                if self.loss and self.chance.random() < 0.1:
                    self.at(
                        self.now_s + self.chance.uniform(0.01, 3.0), self.arrive, to, me, message
                    )

    def arrive(self, to, sender, message):
        self.event(to, self.machines[to].receive, sender, message)

    def fetch(self, me, wanted, until_s):
        """Fetch as the chunk store does: from any live holder, for at most ten seconds."""
        there = [
            m for m in wanted.holders() if m not in self.crashed and wanted.digest in self.holds[m]
        ]
        if wanted.digest in self.holds[me] or there:
            self.holds[me].add(wanted.digest)
            content = json.loads(self.content[wanted.digest])
            corrupt = self.terms.kind == "gather" and content["broken"]
            self.event(me, self.machines[me].fetched, wanted.digest, intact=True, corrupt=corrupt)
        elif self.now_s >= until_s:
            self.event(me, self.machines[me].fetched, wanted.digest, intact=False)
        elif me not in self.crashed:
            self.at(self.now_s + 0.25, self.fetch, me, wanted, until_s)

    def reduce(self, me, wanted):
        if me in self.crashed:
            return
        inputs = [(member, json.loads(self.content[digest])) for member, _, digest in wanted.inputs]
        assert all(digest in self.holds[me] for _, _, digest in wanted.inputs), (
            "reduced what it does not hold"
        )
        assert all(
            parts["of"] == member and parts["bundle"] == wanted.bundle for member, parts in inputs
        )
        good = [member for member, parts in inputs if not parts["broken"]]
        if not any(self.offered[member][1] for member in good):  # nothing, or without weight
            self.event(me, self.machines[me].unreduced, wanted.bundle)
            return
        reduced = json.dumps({"members": good, "bundle": wanted.bundle}).encode()
        rejected = tuple(member for member, parts in inputs if parts["broken"])
        self.event(
            me,
            self.machines[me].reduced,
            wanted.bundle,
            self.keep(me, reduced),
            len(reduced),
            rejected,
        )

    def keep(self, me, content):
        digest = digest_of(content)
        self.content[digest] = content
        self.holds[me].add(digest)
        return digest

    # running and checking

    def run(self, until_s=60.0):
        """Run until all live members are complete, or the time is over."""
        while self.queue and self.now_s < until_s and not self.all_complete():
            self.now_s, _, what, args = heapq.heappop(self.queue)
            what(*args)
        return self.check()

    def all_complete(self):
        return all(self.machines[me].complete for me in self.live)

    @property
    def live(self):
        return [me for me in range(self.n) if me not in self.crashed]

    @property
    def close(self):
        return next(machine.close for machine in self.machines if machine.close is not None)

    def check(self):
        """Check the rules that hold at every end."""
        decided = {machine.closing.decision.decided for machine in self.machines} - {None}
        assert len(decided) <= 1, "two close lists"
        if is_quorum(self.live, self.n) and not self.orphaned and not self.deceived:
            assert self.all_complete(), (
                f"{[me for me in self.live if not self.machines[me].complete]} wait for ever"
            )
        for me in range(self.n):
            machine = self.machines[me]
            if machine.complete and me in self.contributors:
                assert all(item.digest in self.holds[me] for item in machine.close.items)
                assert machine.taken() == tuple(
                    self.is_in(machine.close, me, bundle) for bundle in range(self.bundles)
                )
        if decided:
            self.check_list(self.close)
        if self.terms.witnessed:
            self.check_witnesses()
        return self

    def check_witnesses(self):
        """Check that a member that only votes has what it accepted, and that the decided content is
        somewhere as long as a quorum lives."""
        for machine in self.machines:
            if machine.closing.decision.accepted and not machine.roster.contributes:
                close = decode_close_list(
                    machine.closing.decision.accepted[1], self.terms, self.contributors
                )
                assert all(
                    item.digest in self.holds[machine.roster.me]
                    for item in last_bundles(close, self.bundles)
                )
        if is_quorum(self.live, self.n) and any(machine.close for machine in self.machines):
            for item in last_bundles(self.close, self.bundles):
                assert any(item.digest in self.holds[me] for me in self.live), (
                    "no member knows any more what counts"
                )

    @property
    def orphaned(self):
        """True if some of the decided content is gone, or no peer is left that could have
        contributed before the deadline."""
        if len(self.contributors) == self.n:
            return False
        closes = [machine.close for machine in self.machines if machine.close is not None]
        if not closes:
            return not set(self.contributors) & set(self.live)
        holders = [
            {me for me in self.live if item.digest in self.holds[me]} for item in closes[0].items
        ]
        return not all(holders)

    @property
    def deceived(self):
        """True if a liar's corrupt payload is in a list that it proposed itself, as it alone was
        heard. Agreement tolerates crashes, not lies: no correct encoder writes such a payload."""
        if self.terms.kind != "gather":
            return False
        accepted = filter(None, (machine.closing.decision.accepted for machine in self.machines))
        lists = [decode_close_list(raw, self.terms, self.contributors) for _, raw in accepted]
        return any(self.broken & {member for member, _ in close.members} for close in lists)

    def is_in(self, close, member, bundle):
        """True if a member's contribution is in the content (not the mask) of a bundle."""
        for item in close.items:
            parts = json.loads(self.content[item.digest])
            if parts["bundle"] == bundle and member in parts.get("members", [parts.get("of")]):
                return True
        return False

    def check_list(self, close):
        included = set()
        for item in close.items:
            parts = json.loads(self.content[item.digest])
            members = parts.get("members", [parts.get("of")])
            assert len(set(members)) == len(members)
            assert int.from_bytes(item.mask, "little") == sum(1 << member for member in members)
            assert item.index % self.bundles == parts["bundle"]
            assert not self.broken & set(members) or self.deceived, "a corrupt payload counts"
            included |= set(members)
        assert [member for member, _ in close.members] == sorted(included)
        assert all(self.offered[member][1] == weight for member, weight in close.members)
        assert close.tokens == PRIOR_TOKENS + sum(10 + member for member in included)
        if self.terms.uniform:
            assert len({item.mask for item in close.items}) <= 1, (
                "a member's contribution is in some of the bundles only"
            )
        if self.terms.kind == "mean" and close.items:
            assert [item.index for item in close.items] == list(range(self.bundles))


def offering_world(seed, **options):
    world = ExchangeWorld(seed, **options)
    for me in world.contributors:
        world.offer_at(world.chance.uniform(0, 0.5), me)
    return world


def unlucky_world(seed, kind, *, staged=False, witnessed=False):
    chance = random.Random(f"unlucky {seed}")
    world = ExchangeWorld(
        seed,
        n=(n := chance.randint(1, 7)),
        kind=kind,
        bundles=chance.randint(1, 5),
        loss=chance.choice([0, 0.1, 0.3]),
        voters=chance.randint(0, n - 1) if staged else 0,
        witnessed=witnessed,
    )
    world.flapping = chance.choice([0.0, 0.0, 0.02])
    for me in world.contributors:
        when_s = chance.choice([chance.uniform(0, 1), chance.uniform(0, 15), None])
        if when_s is not None:
            state = OTHER_STATE if chance.random() < 0.1 else STATE
            world.offer_at(
                when_s,
                me,
                state=state,
                weight=chance.uniform(0.5, 2),
                broken=len(world.contributors) > 2 and chance.random() < 0.1,
            )
    for me in chance.sample(range(world.n), chance.randint(0, (world.n - 1) // 2)):
        world.at(chance.uniform(0, 12), world.crash, me)
    return world
