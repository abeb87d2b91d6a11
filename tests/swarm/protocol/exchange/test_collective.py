"""One exchange of a group, machine against machine: a bag of messages, a shared world of chunks,
and bad luck."""

import collections
import heapq
import itertools

import msgspec
import pytest
from worlds.collective import (
    DEADLINE_S,
    KEY,
    OTHER_STATE,
    PRIOR_TOKENS,
    STATE,
    TERMS,
    VIEW,
    ExchangeWorld,
    digest_of,
    mask,
    offering_world,
    unlucky_world,
)
from worlds.seeds import blocks

from farflock.swarm.messages import Decided, Holds, Offer, Reduced
from farflock.swarm.protocol.exchange.actions import Fetch
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.content import SOFT
from farflock.swarm.protocol.exchange.holdings import MANY_BUNDLES, OFFER_WAIT_S, RESEND_S
from farflock.swarm.protocol.exchange.mean import LATE_REDUCER, Mean
from farflock.swarm.protocol.exchange.roster import Roster

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
def test_a_crash_at_any_step_costs_the_others_little_time_and_no_contribution(
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
    """Return the number of rounds that last past the soft deadline, and that of empty ones."""
    slow = empty = 0
    for victim, step in itertools.product(range(4), range(0, 60, 4)):
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
    assert slow > 2
    assert empty > 0


@KINDS
def test_in_seeded_bad_luck_all_that_complete_agree_and_every_live_majority_completes(kind):
    outcomes = collections.Counter()
    for seed in range(40):
        world = unlucky_world(seed, kind).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 20, outcomes


@pytest.mark.long
@KINDS
@blocks(10**6, 10**6 + 10_000, size=1_000)
def test_the_same_holds_in_ten_thousand_seeds(kind, seeds):
    for seed in seeds:
        staged, witnessed = seed % 3 > 0, seed % 3 > 1
        unlucky_world(seed, kind, staged=staged, witnessed=witnessed).run(until_s=200.0)


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
    for seed in range(40):
        world = unlucky_world(seed, kind, staged=True).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 15, outcomes


@KINDS
def test_the_voters_know_what_a_stage_decided_before_it_died_out_at_any_step(kind):
    outcomes = collections.Counter()
    for step in range(offering_world(2, n=6, kind=kind, voters=4, witnessed=True).run().handled[0]):
        world = offering_world(2, n=6, kind=kind, voters=4, witnessed=True)
        world.crash_after[0], world.dies_with[0] = step + 1, 1
        world.run(until_s=80.0)
        assert any(machine.close for machine in world.machines), step
        outcomes[bool(world.close.items)] += 1
    assert min(outcomes[True], outcomes[False]) > 2, outcomes


@KINDS
def test_under_bad_luck_a_voter_holds_what_it_accepts(kind):
    outcomes = collections.Counter()
    for seed in range(40, 80):
        world = unlucky_world(seed, kind, staged=True, witnessed=True).run(until_s=200.0)
        outcomes[bool(world.close.items) if any(m.close for m in world.machines) else None] += 1
    assert outcomes[True] > 15, outcomes


def test_a_witness_costs_a_round_less_than_half_a_second():
    for seed in range(10):
        world = offering_world(seed, n=6, kind="uniform", voters=4, witnessed=True).run()
        assert max(world.finished_s.values()) < 3.0
        assert sum(bool(world.holds[voter]) for voter in range(2, 6)) >= 2


@pytest.mark.parametrize(("kind", "trip_s"), [("mean", 1.0), ("uniform", 2.0), ("gather", 2.0)])
def test_over_lines_so_long_that_proposers_overtake_each_other_they_soon_give_each_other_time(
    kind, trip_s
):
    """A ballot takes two round trips or more, and a proposer does not wait that long for the one
    before it."""
    times = []
    for seed in range(8):
        world = offering_world(seed, n=7, kind=kind, voters=4, witnessed=True, trip_s=trip_s).run(
            until_s=300.0
        )
        times.append(max(world.finished_s.values()))
    assert max(times) < 30 * trip_s, times


def test_the_round_of_a_stage_without_members_is_closed_at_once_by_the_voters():
    world = ExchangeWorld(3, n=5, voters=3)
    for me in world.contributors:
        world.crash(me)
    world.run()
    assert world.close.items == ()
    assert max(world.finished_s.values()) < 4.0


def test_a_member_that_does_not_know_the_tokens_before_a_round_proposes_nothing():
    world = ExchangeWorld(3, n=3, voters=2)
    world.crash(0)
    for machine in world.machines:
        machine.closing.prior_tokens = None
    world.run(until_s=100.0)
    assert not any(machine.close for machine in world.machines)


def test_the_agreement_check_can_fail(monkeypatch):
    """With a quorum of one, members that lose sight of each other must be found to disagree."""
    from farflock.swarm.protocol import decide
    from farflock.swarm.protocol.exchange import availability

    for module in (decide, availability):
        monkeypatch.setattr(module, "is_quorum", lambda members, size: len(members) >= 1)
    with pytest.raises(AssertionError, match="two close lists"):
        offering_world(3, n=4, kind="gather", loss=1.0).run()


@KINDS
def test_a_member_that_brings_nothing_is_waited_for_until_half_time_and_then_left_out(kind):
    world = ExchangeWorld(4, kind=kind)
    for me in (0, 2):
        world.offer_at(0.1, me)
    world.run()
    assert [member for member, _ in world.close.members] == [0, 2]
    assert SOFT * DEADLINE_S <= max(world.finished_s.values()) < SOFT * DEADLINE_S + 3
    assert not any(world.machines[1].taken())
    assert world.machines[1].complete, "it votes and holds all the same"


@KINDS
def test_the_members_that_it_waits_for_are_known(kind):
    world = ExchangeWorld(4, kind=kind)
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
    world = ExchangeWorld(5, kind=kind)
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
def test_a_round_without_contributions_is_decided_empty_by_all_soon_after_the_deadline(kind):
    world = ExchangeWorld(6, n=4, kind=kind).run()
    assert world.close == CloseList((), (), PRIOR_TOKENS)
    assert DEADLINE_S <= max(world.finished_s.values()) < DEADLINE_S + 3
    assert not any(any(machine.taken()) for machine in world.machines)


def test_a_mean_of_corrupt_payloads_alone_fails_and_one_good_one_is_enough():
    world = ExchangeWorld(7)
    for me in range(3):
        world.offer_at(0.1, me, broken=True)
    assert world.run().close.items == ()
    world = ExchangeWorld(7)
    for me in range(3):
        world.offer_at(0.1, me, broken=me != 1)
    assert world.run().close.members == ((1, 1.0),)


@pytest.mark.parametrize("kind", ["mean", "uniform"])
@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0), (0.0, None, 0.0), (0.0, 0.0, 1.0)])
def test_a_mean_fails_at_once_if_all_that_the_living_bring_has_no_weight(kind, weights):
    """Of a stage of three, one may bring all the weight, or die before it has brought anything."""
    world = ExchangeWorld(16, n=6, kind=kind, voters=3)
    for me, weight in enumerate(weights):
        if weight is None:
            world.at(0.0, world.crash, me)
        else:
            world.offer_at(0.1, me, weight=weight)
    world.run()
    heavy = any(weights)
    assert [member for member, _ in world.close.members] == ([0, 1, 2] if heavy else [])
    assert max(world.finished_s.values()) < 5.0


@pytest.mark.parametrize("kind", ["mean", "uniform"])
def test_a_stage_waits_for_no_deadline_where_the_one_that_has_weight_dies_at_any_step(kind):
    empty, steps = 0, 40
    for step in range(steps):
        world = ExchangeWorld(1, n=6, kind=kind, voters=4)
        world.crash_after[0] = step + 1
        for me, weight in enumerate((8.0, 0.0)):
            world.offer_at(0.1, me, weight=weight)
        world.run()
        empty += not world.close.items
        assert max(world.finished_s.values()) < 6.0, step
    assert 0 < empty < steps


def test_a_member_that_has_not_offered_yet_may_bring_the_weight():
    world = ExchangeWorld(16)
    for me, weight in enumerate((0.0, 0.0, 1.0)):
        world.offer_at(4.0 if weight else 0.1, me, weight=weight)
    assert world.run().close.members == ((0, 0.0), (1, 0.0), (2, 1.0))


@KINDS
def test_a_corrupt_payload_is_left_out_and_the_others_are_in(kind):
    world = ExchangeWorld(8, kind=kind)
    for me in range(3):
        world.offer_at(0.1, me, broken=me == 2)
    world.run()
    assert [member for member, _ in world.close.members] == [0, 1]
    assert world.machines[2].taken() == (False,) * 3


def test_a_mean_takes_only_members_that_started_from_the_most_common_state():
    world = ExchangeWorld(9, n=5)
    for me in range(5):
        world.offer_at(0.1, me, state=OTHER_STATE if me in (0, 3) else STATE)
    world.run()
    assert [member for member, _ in world.close.members] == [1, 2, 4]
    assert world.close.state == STATE


def test_a_dead_reducers_shards_are_reduced_by_the_next_in_line():
    for victim in range(5):
        world = offering_world(10, n=5, bundles=10)
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


def test_a_result_with_an_offer_that_no_survivor_knows_fails_at_the_deadline():
    """Only the reducer heard of member 2, then both died: no survivor knows that member's
    weight."""
    world = ExchangeWorld(12, n=5, bundles=1)
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


def test_a_gathered_payload_whose_owner_dies_is_fetched_from_a_member_that_holds_it_by_then():
    """Two members have the dead one's payload; the third asks them as soon as they say so, not
    after its first timeout."""
    world = offering_world(13, n=4, kind="gather", bundles=2)
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


def test_messages_grow_with_the_square_of_the_group_and_not_with_the_wait():
    def messages(n, wait_s):
        world = ExchangeWorld(14, n=n, bundles=n)
        for me in range(n):
            world.offer_at(0.1 if me else wait_s, me)
        world.run()
        return sum(world.sent.values()), world.sent_bytes

    quick, _ = messages(4, 0.1)
    assert quick < 12 * 4 * 4
    assert messages(7, 0.1)[0] < 12 * 7 * 7
    waited, waited_bytes = messages(4, 8.1)
    assert waited < quick + 8 / 2 * (4 * 3) * 2, "each tells each other every two seconds: not yet"
    assert waited_bytes < 60_000


def test_everything_is_asked_for_once_at_a_time():
    fetches = collections.Counter()

    class Counting(ExchangeWorld):
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


def test_a_result_is_fetched_from_its_known_holders_and_from_any_peer_once_they_are_gone():
    """A member that cannot have it yet would only say so, a round trip later."""
    machine = Collective(KEY, VIEW, Roster(tuple("abcd"), 3, (0, 1, 2, 3)), TERMS, 0.0)
    digest = digest_of(b"reduced")
    machine.receive(0.1, 0, Reduced(KEY, VIEW, 0, digest, 7, mask(0, 1)))
    (wanted,) = (action for action in machine.take() if isinstance(action, Fetch))
    assert wanted.holders() == (0,)
    machine.receive(0.2, 2, Holds(KEY, VIEW, 0, bytes(4) + digest[:8]))
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


def test_what_was_decided_is_fetched_from_any_member():
    """Its owner has been restarted since, and the others have not said that they hold it."""
    terms = RoundTerms("gather", 1, DEADLINE_S)
    machine = Collective(KEY, VIEW, Roster(tuple("abcd"), 3, (0, 1, 2, 3)), terms, 0.0)
    digests = [digest_of(bytes([member])) for member in range(3)]
    items = tuple(RoundItem(place, digest, 1, mask(place)) for place, digest in enumerate(digests))
    close = CloseList(items, tuple((member, 1.0) for member in range(3)), 30, STATE)
    proofs = tuple((member, b"") for member in range(3))
    machine.receive(0.1, 1, Decided(KEY, VIEW, msgspec.msgpack.encode(close), (1, 1), proofs))
    wanted = [action for action in machine.take() if isinstance(action, Fetch)]
    assert [each.digest for each in wanted] == digests
    assert [each.holders() for each in wanted] == [(0, 1, 2), (1, 0, 2), (2, 0, 1)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_member_that_leaves_proposes_only_what_one_that_stays_holds_too(leaves):
    """The senior of two may decide alone; what it alone holds would be gone with it."""
    machine = Collective(
        KEY, VIEW, Roster(("a", "b"), 0, (0, 1)), RoundTerms("gather", 1, DEADLINE_S), 0.0
    )
    machine.tick(0.1, frozenset({0} if leaves else ()))
    mine, theirs = digest_of(b"mine"), digest_of(b"theirs")
    machine.receive(0.1, 1, Offer(KEY, VIEW, (theirs,), (6,), 1.0, 10, STATE))
    machine.offer(0.1, Offer(KEY, VIEW, (mine,), (4,), 1.0, 10, STATE))
    machine.fetched(0.2, theirs, intact=True)
    assert machine.complete != leaves
    held = b"".join(
        bytes([place, 0, 0, 0]) + digest[:8] for place, digest in enumerate([mine, theirs])
    )
    machine.receive(0.3, 1, Holds(KEY, VIEW, 0, held))
    assert machine.complete
    assert [member for member, _ in machine.close.members] == [0, 1]


def test_ticks_after_the_end_do_nothing():
    world = offering_world(16).run()
    for me in range(3):
        world.machines[me].tick(world.now_s + 100, frozenset({0, 1, 2}))
        assert world.machines[me].take() == []


def test_what_a_member_says_it_holds_may_be_nonsense():
    world = offering_world(17)
    for noise in (b"", b"x", bytes(24), b"\xff" * 12 * 500):
        for first in (0, 1, 2**62):
            world.at(0.3, world.arrive, 0, 1, Holds(KEY, VIEW, first, noise, first, True))
    world.run()
    assert len(world.close.members) == 3


def test_nothing_is_fetched_any_more_that_a_decided_list_does_not_need():
    """Members drop it, and would refuse it for as long as it is asked for."""
    world = offering_world(16, n=3)
    wanted, act = [], world.act

    def watching(me, action):
        if isinstance(action, Fetch):
            wanted.append((me, action))
        act(me, action)

    world.act = watching
    world.run()
    assert wanted
    decided = {item.digest for item in world.close.items}
    assert all(fetch.holders() == () for _, fetch in wanted if fetch.digest not in decided)


def test_a_long_round_repeats_its_offers_and_reductions_later():
    def sent_again(bundles):
        machine = Collective(
            KEY,
            VIEW,
            Roster(tuple("ab"), 0, (0, 1)),
            RoundTerms("mean", bundles, deadline_s=100.0),
            100.0,
        )
        offer = Offer(KEY, VIEW, (bytes(32),) * bundles, (5,) * bundles, 1.0, 10)
        machine.offer(100.0, offer)
        machine.take()
        times = []
        for tick in range(1, 40):
            machine.tick(100 + tick / 10, frozenset())
            said = [action for action in machine.take() if isinstance(action, tuple)]
            times += [tick / 10 for _, message in said if isinstance(message, Offer)]
        return times[0]

    assert sent_again(MANY_BUNDLES - 1) == 0.1
    assert OFFER_WAIT_S <= sent_again(MANY_BUNDLES) <= OFFER_WAIT_S + RESEND_S
