"""One exchange of a group, machine against machine: a bag of messages, a shared world of chunks, and bad luck."""

import collections
import hashlib
import heapq
import itertools
import json
import random

import msgspec
import pytest

from farflock.swarm.messages import Holds, Key, Offer, Reduced
from farflock.swarm.protocol.exchange.actions import Fetch, Reduce
from farflock.swarm.protocol.exchange.close_list import (
    CloseList,
    RoundTerms,
    decode_close_list,
    last_shards,
)
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.content import SOFT
from farflock.swarm.protocol.exchange.mean import LATE_REDUCER, Mean
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.quorum import is_quorum

KEY, VIEW = Key("weights", 3), bytes(32)
DEADLINE_S = 20.0
TICK_S = 0.1
PRIOR_TOKENS = 1000
STATE, OTHER_STATE = b"s" * 32, b"t" * 32


TERMS = RoundTerms("mean", 2, DEADLINE_S)


def digest_of(content):
    return hashlib.sha256(content).digest()


def mask(*members):
    return sum(1 << member for member in members).to_bytes(8, "little")


def contribution(member, shard, *, broken=False):
    return json.dumps({"of": member, "shard": shard, "broken": broken}).encode()


class World:
    """`n` machines in virtual time. Chunks are JSON that says whose contributions are in them, so that a result can
    be checked against its mask. Of the `n` machines the last `voters` only vote."""

    def __init__(
        self,
        seed,
        n=3,
        kind="mean",
        shards=3,
        *,
        loss=0.0,
        deadline_s=DEADLINE_S,
        voters=0,
        witnessed=False,
        trip_s=0.2,
    ):
        self.chance = random.Random(seed)
        self.n, self.shards, self.loss, self.trip_s = n, shards, loss, trip_s
        self.waits = (
            (0.05, 1.0) if trip_s < 1 else (0.8, 1.0)
        )  # of a trip: long lines are not so by chance
        kinds = {"uniform": kind == "uniform", "witnessed": witnessed}
        self.terms = RoundTerms(
            "gather" if kind == "gather" else "mean", shards, deadline_s, **kinds
        )
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
                self.holds[me].__contains__,
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
        shards = [contribution(me, shard, broken=broken) for shard in range(self.shards)]
        digests = tuple(self.keep(me, shard) for shard in shards)
        sizes = tuple(len(shard) for shard in shards)
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
        """What the chunk store does: any live holder will do; patience ends after ten seconds."""
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
            parts["of"] == member and parts["shard"] == wanted.shard for member, parts in inputs
        )
        good = [member for member, parts in inputs if not parts["broken"]]
        if not good:
            self.event(me, self.machines[me].unreduced, wanted.shard)
            return
        reduced = json.dumps({"members": good, "shard": wanted.shard}).encode()
        rejected = tuple(member for member, parts in inputs if parts["broken"])
        self.event(
            me,
            self.machines[me].reduced,
            wanted.shard,
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
        """Until all live members are complete, or the time is over."""
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
        """What must hold at every end."""
        decided = {machine.closing.decision.decided for machine in self.machines} - {None}
        assert len(decided) <= 1, "two close lists"
        if is_quorum(self.live, self.n) and not self.orphaned:
            assert self.all_complete(), (
                f"{[me for me in self.live if not self.machines[me].complete]} wait for ever"
            )
        for me in range(self.n):
            machine = self.machines[me]
            if machine.complete and me in self.contributors:
                assert all(item.digest in self.holds[me] for item in machine.close.items)
                assert machine.taken() == tuple(
                    self.is_in(machine.close, me, shard) for shard in range(self.shards)
                )
        if decided:
            self.check_list(self.close)
        if self.terms.witnessed:
            self.check_witnesses()
        return self

    def check_witnesses(self):
        """Who only votes has what it accepted, and what is decided is somewhere as long as a quorum lives."""
        for machine in self.machines:
            if machine.closing.decision.accepted and not machine.roster.contributes:
                close = decode_close_list(
                    machine.closing.decision.accepted[1], self.terms, self.contributors
                )
                assert all(
                    item.digest in self.holds[machine.roster.me]
                    for item in last_shards(close, self.shards)
                )
        if is_quorum(self.live, self.n) and any(machine.close for machine in self.machines):
            for item in last_shards(self.close, self.shards):
                assert any(item.digest in self.holds[me] for me in self.live), (
                    "nobody knows any more what counts"
                )

    @property
    def orphaned(self):
        """Whether nothing is left of some of the decided content, or nobody is left to have brought any before the deadline."""
        if len(self.contributors) == self.n:
            return False
        closes = [machine.close for machine in self.machines if machine.close is not None]
        if not closes:
            return not set(self.contributors) & set(self.live)
        holders = [
            {me for me in self.live if item.digest in self.holds[me]} for item in closes[0].items
        ]
        return not all(holders)

    def is_in(self, close, member, shard):
        """Whether a member's contribution is in the content (not the mask) of a shard."""
        for item in close.items:
            parts = json.loads(self.content[item.digest])
            if parts["shard"] == shard and member in parts.get("members", [parts.get("of")]):
                return True
        return False

    def check_list(self, close):
        included = set()
        for item in close.items:
            parts = json.loads(self.content[item.digest])
            members = parts.get("members", [parts.get("of")])
            assert len(set(members)) == len(members)
            assert int.from_bytes(item.mask, "little") == sum(1 << member for member in members)
            assert item.index % self.shards == parts["shard"]
            assert not self.broken & set(members), "a corrupt payload is in the result"
            included |= set(members)
        assert [member for member, _ in close.members] == sorted(included)
        assert all(self.offered[member][1] == weight for member, weight in close.members)
        assert close.tokens == PRIOR_TOKENS + sum(10 + member for member in included)
        if self.terms.uniform:
            assert len({item.mask for item in close.items}) <= 1, (
                "somebody's contribution is in half of the shards"
            )
        if self.terms.kind == "mean" and close.items:
            assert [item.index for item in close.items] == list(range(self.shards))


def offering_world(seed, **options):
    world = World(seed, **options)
    for me in world.contributors:
        world.offer_at(world.chance.uniform(0, 0.5), me)
    return world


KINDS = pytest.mark.parametrize("kind", ["mean", "uniform", "gather"])


@KINDS
@pytest.mark.parametrize("n", range(1, 8))
def test_undisturbed_everybody_is_in_and_it_takes_a_second(kind, n):
    for seed in range(10):
        world = offering_world(seed, n=n, kind=kind).run()
        assert [member for member, _ in world.close.members] == list(range(n))
        assert all(all(machine.taken()) for machine in world.machines)
        assert max(world.finished_s.values()) < 2.5


@KINDS
def test_a_crash_at_every_step_of_every_member_costs_the_others_little_time_and_no_contribution_of_theirs(
    kind,
):
    for victim in range(3):
        steps = offering_world(1, kind=kind).run().handled[victim]
        assert steps > 10
        for step in range(steps):
            world = offering_world(1, kind=kind)
            world.crash_after[victim] = step + 1
            world.run()
            others = [me for me in range(3) if me != victim]
            if victim in world.crashed:
                assert max(world.finished_s[me] for me in others) - world.crashed[victim] < 5.0, (
                    victim,
                    step,
                )
            assert all(all(world.machines[me].taken()) for me in others), (victim, step)


def uniform_after_a_crash():
    """How many of these rounds go on without waiting for half of their time, and how many are empty."""
    slow = empty = 0
    for victim, step in itertools.product(range(4), range(0, 60, 2)):
        world = offering_world(2, n=4, kind="uniform")
        world.crash_after[victim] = step + 1
        world.run()
        slow += max(world.finished_s.values()) > SOFT * DEADLINE_S
        empty += not world.close.items
    return slow, empty


def test_where_a_member_dies_while_others_fetch_from_it_they_reduce_again_without_it(monkeypatch):
    assert uniform_after_a_crash() == (0, 0)
    monkeypatch.setattr(Mean, "_narrow", lambda self: None)
    slow, empty = uniform_after_a_crash()
    assert slow > 5
    assert empty > 0


@KINDS
def test_in_seeded_bad_luck_all_who_complete_agree_and_every_live_majority_completes(kind):
    outcomes = collections.Counter()
    for seed in range(60):
        world = unlucky_world(seed, kind).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 30, outcomes


@pytest.mark.long
@pytest.mark.timeout(3600)
@KINDS
def test_the_same_holds_in_ten_thousand_seeds(kind):
    for seed in range(10**6, 10**6 + 10_000):
        unlucky_world(seed, kind).run(until_s=200.0)


def unlucky_world(seed, kind, *, staged=False, witnessed=False):
    chance = random.Random(f"unlucky {seed}")
    world = World(
        seed,
        n=(n := chance.randint(1, 7)),
        kind=kind,
        shards=chance.randint(1, 5),
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


@KINDS
@pytest.mark.parametrize("contributors", [1, 2, 3])
def test_of_a_stage_its_members_alone_contribute_and_all_others_learn_what_was_decided(
    kind, contributors
):
    for seed in range(10):
        world = offering_world(seed, n=6, kind=kind, voters=6 - contributors).run()
        assert [member for member, _ in world.close.members] == list(range(contributors))
        assert all(machine.complete for machine in world.machines)
        assert not any(world.holds[voter] for voter in range(contributors, 6))
        assert max(world.finished_s.values()) < 2.5


@KINDS
def test_a_stage_of_two_goes_on_when_one_of_them_dies_at_any_step(kind):
    for victim in range(2):
        for step in range(offering_world(1, n=6, kind=kind, voters=4).run().handled[victim]):
            world = offering_world(1, n=6, kind=kind, voters=4)
            world.crash_after[victim] = step + 1
            world.run(until_s=40.0)
            assert world.all_complete() or world.orphaned, (victim, step)
            other = world.machines[1 - victim]
            if victim in world.crashed and other.complete:
                assert world.finished_s[1 - victim] - world.crashed[victim] < 5.0, (victim, step)
                assert all(other.taken()) or not other.close.items, (victim, step)


@KINDS
def test_what_a_stage_decides_in_bad_luck_all_others_decide_too(kind):
    outcomes = collections.Counter()
    for seed in range(120):
        world = unlucky_world(seed, kind, staged=True).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 50, outcomes


@KINDS
def test_what_a_stage_decided_before_it_died_out_at_any_step_is_known_to_who_voted(kind):
    outcomes = collections.Counter()
    for step in range(offering_world(2, n=6, kind=kind, voters=4, witnessed=True).run().handled[0]):
        world = offering_world(2, n=6, kind=kind, voters=4, witnessed=True)
        world.crash_after[0], world.dies_with[0] = step + 1, 1
        world.run(until_s=80.0)
        assert any(machine.close for machine in world.machines), step
        outcomes[bool(world.close.items)] += 1
    assert min(outcomes[True], outcomes[False]) > 2, outcomes


@KINDS
def test_in_bad_luck_too_who_votes_holds_what_it_accepts(kind):
    outcomes = collections.Counter()
    for seed in range(120):
        world = unlucky_world(seed, kind, staged=True, witnessed=True).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 50, outcomes


def test_a_witness_costs_a_round_less_than_half_a_second():
    for seed in range(10):
        world = offering_world(seed, n=6, kind="uniform", voters=4, witnessed=True).run()
        assert max(world.finished_s.values()) < 3.0
        assert sum(bool(world.holds[voter]) for voter in range(2, 6)) >= 2


@KINDS
@pytest.mark.parametrize("trip_s", [1.0, 2.0])
def test_over_lines_so_long_that_proposers_overtake_each_other_they_soon_give_each_other_time(
    kind, trip_s
):
    """A ballot takes two round trips and more, and a proposer does not wait so long for the one before it."""
    times = []
    for seed in range(20):
        world = offering_world(seed, n=7, kind=kind, voters=4, witnessed=True, trip_s=trip_s).run(
            until_s=300.0
        )
        times.append(max(world.finished_s.values()))
    assert max(times) < 30 * trip_s, times


def test_the_round_of_a_stage_that_nobody_is_left_of_is_closed_by_the_others_as_soon_as_they_look():
    world = World(3, n=5, voters=3)
    for me in world.contributors:
        world.crash(me)
    world.run()
    assert world.close.items == ()
    assert max(world.finished_s.values()) < 4.0


def test_who_does_not_know_the_tokens_before_a_round_puts_nothing_forward():
    world = World(3, n=3, voters=2)
    world.crash(0)
    for machine in world.machines:
        machine.closing.prior_tokens = None
    world.run(until_s=100.0)
    assert not any(machine.close for machine in world.machines)


def test_the_agreement_check_can_fail(monkeypatch):
    """With a quorum of one anywhere, members that lose sight of each other must be found to disagree."""
    from farflock.swarm.protocol import decide
    from farflock.swarm.protocol.exchange import availability

    for module in (decide, availability):
        monkeypatch.setattr(module, "is_quorum", lambda members, size: len(members) >= 1)
    with pytest.raises(AssertionError, match="two close lists"):
        offering_world(1, n=4, kind="gather", loss=1.0).run()


@KINDS
def test_a_member_that_brings_nothing_is_waited_for_until_half_time_and_then_left_out(kind):
    world = World(4, kind=kind)
    for me in (0, 2):
        world.offer_at(0.1, me)
    world.run()
    assert [member for member, _ in world.close.members] == [0, 2]
    assert SOFT * DEADLINE_S <= max(world.finished_s.values()) < SOFT * DEADLINE_S + 3
    assert not any(world.machines[1].taken())
    assert world.machines[1].complete, "it votes and holds all the same"


@KINDS
def test_whom_it_waits_for_is_known(kind):
    world = World(4, kind=kind)
    world.offer_at(0.1, 0)
    while world.now_s < 3.0:
        world.now_s, _, what, args = heapq.heappop(world.queue)
        what(*args)
    assert world.machines[0].awaited() == ("peer1", "peer2")
    world.crash(2)
    while world.now_s < 5.0:
        world.now_s, _, what, args = heapq.heappop(world.queue)
        what(*args)
    assert world.machines[0].awaited() == ("peer1",)


@KINDS
def test_an_offer_that_comes_after_the_end_changes_nothing_and_is_not_taken(kind):
    world = World(5, kind=kind)
    for me in (0, 1):
        world.offer_at(0.1, me)
    world.run()
    closed = world.close
    world.offer(2, STATE, 1.0, False)
    for _ in range(200):
        world.now_s, _, what, args = heapq.heappop(world.queue)
        what(*args)
    world.check()
    assert world.close == closed
    assert world.machines[2].taken() == (False,) * 3


@KINDS
def test_a_round_that_nobody_fills_is_decided_empty_by_all_soon_after_the_deadline(kind):
    world = World(6, n=4, kind=kind).run()
    assert world.close == CloseList((), (), PRIOR_TOKENS)
    assert DEADLINE_S <= max(world.finished_s.values()) < DEADLINE_S + 3
    assert not any(any(machine.taken()) for machine in world.machines)


def test_a_mean_of_corrupt_payloads_alone_fails_and_one_good_one_is_enough():
    world = World(7)
    for me in range(3):
        world.offer_at(0.1, me, broken=True)
    assert world.run().close.items == ()
    world = World(7)
    for me in range(3):
        world.offer_at(0.1, me, broken=me != 1)
    assert world.run().close.members == ((1, 1.0),)


@KINDS
def test_a_corrupt_payload_is_left_out_and_the_others_are_in(kind):
    world = World(8, kind=kind)
    for me in range(3):
        world.offer_at(0.1, me, broken=me == 2)
    world.run()
    assert [member for member, _ in world.close.members] == [0, 1]
    assert world.machines[2].taken() == (False,) * 3


def test_a_mean_takes_only_those_who_started_from_the_state_that_most_started_from():
    world = World(9, n=5)
    for me in range(5):
        world.offer_at(0.1, me, state=OTHER_STATE if me in (0, 3) else STATE)
    world.run()
    assert [member for member, _ in world.close.members] == [1, 2, 4]
    assert world.close.state == STATE


def test_a_dead_reducers_shards_are_reduced_by_the_next_in_line():
    for victim in range(5):
        world = offering_world(10, n=5, shards=10)
        world.at(0.0, world.crash, victim)
        world.run()
        assert [member for member, _ in world.close.members] == [
            me for me in range(5) if me != victim
        ]
        assert max(world.finished_s.values()) < 4.0, "one second to notice, then one reduction"


def test_a_live_reducer_that_hangs_is_replaced_late_in_the_round():
    world = offering_world(11)
    hanging = world.machines[1].roster.ordered[0]
    world.reduce = lambda me, wanted, reduce=world.reduce: (
        None if me == hanging else reduce(me, wanted)
    )
    world.run()
    assert len(world.close.members) == 3
    assert LATE_REDUCER * DEADLINE_S < max(world.finished_s.values()) < DEADLINE_S + 3


def test_a_result_with_a_member_whose_offer_no_survivor_knows_fails_at_the_deadline_instead_of_never():
    """The reducer alone heard of member 2, then both died: nobody left knows that member's weight."""
    world = World(12, n=5, shards=1)
    reducer = world.machines[0].roster.ordered[0]
    stranger = next(me for me in range(5) if me != reducer)
    for me in range(5):
        world.offer_at(0.1, me)
    arrive = world.arrive
    world.arrive = lambda to, sender, message: (
        None
        if isinstance(message, Offer) and sender == stranger and to != reducer
        else arrive(to, sender, message)
    )
    survivors = {me for me in range(5) if me not in (reducer, stranger)}
    reduced = set()

    def fetch(me, wanted, until_s, fetch=world.fetch):
        fetch(me, wanted, until_s)
        reduced.update(
            {wanted.digest} & set(world.machines[reducer].content.availability.rivals[0])
        )
        if reduced and all(reduced <= world.holds[survivor] for survivor in survivors):
            world.crash(reducer)
            world.crash(stranger)

    world.fetch = fetch
    world.run(until_s=60.0)
    assert set(world.crashed) == {reducer, stranger}
    assert max(world.finished_s.values()) < DEADLINE_S + 3
    assert world.close.items == ()


def test_a_gathered_payload_whose_owner_dies_is_fetched_from_whoever_holds_it_by_then():
    """Two have the dead member's payload, the third asks them as soon as they say so, not after its first patience."""
    world = offering_world(13, n=4, kind="gather", shards=2)
    owner, late = 0, 3
    fetch = world.fetch

    def slow(me, wanted, until_s):
        if me == late and owner in wanted.holders() and world.now_s < 1.5:
            world.at(world.now_s + 0.1, world.fetch, me, wanted, until_s)
        else:
            fetch(me, wanted, until_s)

    world.fetch = slow
    world.at(1.2, world.crash, owner)
    world.run()
    assert owner in [member for member, _ in world.close.members]
    assert world.finished_s[late] < 4.0


def test_the_number_of_messages_grows_with_the_square_of_the_group_and_not_with_what_is_waited_for():
    def messages(n, wait_s):
        world = World(14, n=n, shards=n)
        for me in range(n):
            world.offer_at(0.1 if me else wait_s, me)
        world.run()
        return sum(world.sent.values()), world.sent_bytes

    quick, _ = messages(4, 0.1)
    assert quick < 12 * 4 * 4
    assert messages(7, 0.1)[0] < 12 * 7 * 7
    waited, waited_bytes = messages(4, 8.1)
    assert waited < quick + 2 * 8 * (4 * 3) * 3, (
        "twice a second each repeats its offer and what it reduced and holds"
    )
    assert waited_bytes < 200_000


def test_everything_is_asked_for_once_at_a_time():
    fetches = collections.Counter()

    class Counting(World):
        def act(self, me, action):
            if isinstance(action, Fetch):
                fetches[me, action.digest] += 1
            super().act(me, action)

    world = Counting(15, n=5)
    for me in range(5):
        world.offer_at(0.1, me)
    world.run()
    assert fetches
    assert set(fetches.values()) == {1}


def test_a_result_is_fetched_from_who_announced_it_or_says_to_hold_it_and_from_anybody_once_those_are_gone():
    """Whoever cannot have it yet would only answer that it does not, a round trip later."""
    machine = Collective(KEY, VIEW, Roster(tuple("abcd"), 3, (0, 1, 2, 3)), TERMS, 0.0)
    digest = digest_of(b"reduced")
    machine.receive(0.1, 0, Reduced(KEY, VIEW, 0, digest, 7, mask(0, 1)))
    (wanted,) = (action for action in machine.take() if isinstance(action, Fetch))
    assert wanted.holders() == (0,)
    machine.receive(0.2, 2, Holds(KEY, VIEW, digest[:8] + bytes(8)))
    assert wanted.holders() == (0, 2)
    machine.receive(0.3, 1, Reduced(KEY, VIEW, 0, digest, 7, mask(0, 1)))
    assert wanted.holders() == (0, 1, 2)
    machine.tick(0.4, frozenset({0, 1, 2}))
    assert set(wanted.holders()) == {0, 1, 2}

    lone = Collective(KEY, VIEW, Roster(tuple("abcd"), 3, (0, 1, 2, 3)), TERMS, 0.0)
    lone.receive(0.1, 1, Reduced(KEY, VIEW, 0, digest, 7, mask(0, 1)))
    (wanted,) = (action for action in lone.take() if isinstance(action, Fetch))
    lone.tick(0.2, frozenset({1}))
    assert set(wanted.holders()) == {0, 1, 2}, "the announcer is gone: the others may have got it"


def test_ticks_after_the_end_do_nothing():
    world = offering_world(16).run()
    for me in range(3):
        world.machines[me].tick(world.now_s + 100, frozenset({0, 1, 2}))
        assert world.machines[me].take() == []


def test_what_a_member_says_it_holds_may_be_nonsense():
    world = offering_world(17)
    for noise in (b"", b"x", bytes(24), b"\xff" * 8 * 500):
        world.at(0.3, world.arrive, 0, 1, Holds(KEY, VIEW, noise))
    world.run()
    assert len(world.close.members) == 3
