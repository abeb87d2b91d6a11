"""Members' offers: one each, and a mean of only those that started from the same state."""

from farflock.swarm.messages import Key, Offer
from farflock.swarm.protocol.exchange.offers import Offers

KEY, VIEW = Key("weights", 3), bytes(32)


def offer(state=b"s", *, bundles=2, tokens=10, weight=1.0):
    digests = tuple(bytes([bundle]) * 32 for bundle in range(bundles))
    return Offer(KEY, VIEW, digests, (5,) * bundles, weight, tokens, state)


def filled(states):
    offers = Offers(2)
    for member, state in states.items():
        assert offers.add(member, offer(state, tokens=10 + member, weight=float(member)))
    return offers


def test_the_first_offer_of_a_member_stands_and_one_of_another_size_is_refused():
    offers = Offers(2)
    assert not offers.add(0, offer(bundles=3))
    assert not offers
    assert offers.add(0, offer(tokens=1))
    assert not offers.add(0, offer(tokens=2))
    assert (offers.tokens([0]), list(offers), len(offers)) == (1, [0], 1)


def test_the_common_state_is_that_of_most_and_of_equals_the_most_seniors():
    assert Offers(2).common_state() == b""
    assert filled({0: b"b", 1: b"a", 2: b"b"}).common_state() == b"b"
    for mine, others in ((b"b", b"a"), (b"a", b"b")):
        assert filled({1: others, 0: mine}).common_state() == mine
        assert filled({3: others, 1: mine}).common_state() == mine
    assert filled({0: b"c", 1: b"a", 2: b"b"}).common_state([1, 2]) == b"a"


def test_inputs_are_in_member_order_and_leave_out_members_that_started_elsewhere():
    inputs = filled({3: b"s", 1: b"t", 0: b"s"}).inputs(1)
    assert inputs == ((0, 0.0, bytes([1]) * 32), (3, 3.0, bytes([1]) * 32))


def test_tokens_and_presence_are_asked_of_members():
    offers = filled({0: b"s", 2: b"s"})
    assert offers.includes([0, 2])
    assert offers.includes([])
    assert not offers.includes([0, 1])
    assert offers.tokens([0, 2]) == 22
