"""What a member may claim follows from the run's terms and the newest list, the same everywhere."""

import msgspec
import pytest
from worlds.decisions import electorate_of

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_OFFERED_TOKENS, Key, Offer, Promise, Propose
from farflock.swarm.protocol.entitlement import (
    BEGINNING,
    MAX_CLAIMED_ROUNDS,
    MAX_COUNTED,
    Entitlement,
    Precedent,
    list_hash,
    precedent_after,
)
from farflock.swarm.protocol.exchange.availability import RoundItem, mask_of
from farflock.swarm.protocol.exchange.close_list import (
    BadCloseList,
    CloseList,
    NotEntitled,
    RoundTerms,
)
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.roster import Roster

KEY, VIEW = Key("weights", 7), bytes(32)
PEERS = electorate_of(3, VIEW).peers
ENTITLED = Entitlement(tokens=100)
PRIOR = Precedent(
    1000,
    dict(zip(PEERS, (0, 1, 3), strict=True)),
    list_hash(b"the list before"),
    dict(zip(PEERS, (5, 4, 0), strict=True)),
)


def after(precedent, counted):
    return precedent.idle_after(PEERS, counted), precedent.counted_after(PEERS, counted)


def following(counted):
    idle, often = after(PRIOR, counted)
    return {"idle": idle, "counted": often}


def test_a_member_may_claim_for_each_round_since_it_was_counted_and_a_newcomer_for_the_most():
    assert [PRIOR.rounds(peer) for peer in PEERS] == [1, 2, 4]
    assert PRIOR.rounds("newcomer") == MAX_CLAIMED_ROUNDS
    assert BEGINNING.rounds(PEERS[0]) == MAX_CLAIMED_ROUNDS


def test_the_rounds_without_a_member_are_counted_from_list_to_list_up_to_the_most():
    precedent = BEGINNING
    for number in range(2 * MAX_CLAIMED_ROUNDS):
        value = b"%d" % number
        precedent = precedent_after(value, 0, *after(precedent, {0}), PEERS)
        waited = min(number + 1 + MAX_CLAIMED_ROUNDS, MAX_CLAIMED_ROUNDS)
        assert [precedent.rounds(peer) for peer in PEERS] == [1, waited, waited]
    precedent = precedent_after(b"", 0, *after(precedent, {1}), PEERS)
    assert [precedent.rounds(peer) for peer in PEERS] == [2, 1, MAX_CLAIMED_ROUNDS]


def test_the_rounds_that_counted_a_member_are_added_up_from_list_to_list_and_end_at_a_byte():
    precedent = BEGINNING
    for _ in range(MAX_COUNTED + 5):
        precedent = precedent_after(b"", 0, *after(precedent, {0}), PEERS)
    precedent = precedent_after(b"", 0, *after(precedent, {2}), PEERS)
    assert [precedent.counted[peer] for peer in PEERS] == [MAX_COUNTED, 0, 1]


def test_where_the_list_is_not_known_others_may_claim_the_most_and_this_peer_one_round():
    unknown = Precedent(1000, hash=None)
    assert unknown.rounds(PEERS[1]) == MAX_CLAIMED_ROUNDS
    assert unknown.sure_rounds(PEERS[0]) == 1


def test_no_claim_exceeds_what_a_message_can_say_and_an_update_may_always_weigh_one():
    assert Entitlement().max_tokens(8) == MAX_OFFERED_TOKENS
    assert Entitlement(weight=0.5).max_weight(1) == 1.0
    assert Entitlement(weight=0.5).max_weight(4) == 2.0
    assert ENTITLED.allows(200, 1.0, 2)
    assert not ENTITLED.allows(201, 1.0, 2)
    assert not ENTITLED.allows(0, 1.0001, 2)


def machine_of(me, prior=PRIOR, entitlement=ENTITLED):
    terms = RoundTerms("mean", 1, entitlement=entitlement)
    """A member that holds whatever a list names."""
    return Collective(
        KEY,
        electorate_of(3, VIEW),
        Roster(PEERS, me, (0, 1, 2)),
        terms,
        0.0,
        prior,
        holding=lambda bundle, digest: True,
    )


def offer(tokens=1, weight=1.0):
    return Offer(KEY, VIEW, (digest_of(b"x"),), (5,), weight, tokens)


@pytest.mark.parametrize(
    ("sender", "claim"),
    [(1, {"tokens": 201}), (2, {"tokens": 2**40}), (1, {"weight": 1e18}), (1, {"weight": 1.01})],
)
def test_an_offer_above_its_entitlement_is_refused_and_its_sender_not_waited_for(sender, claim):
    machine = machine_of(0)
    with pytest.raises(NotEntitled, match="offer above its entitlement"):
        machine.receive(0.1, sender, offer(**claim))
    assert sender not in machine.content.offers
    machine.tick(0.2, frozenset())
    assert PEERS[sender] not in machine.awaited()
    assert len(machine.awaited()) == 1


def test_an_offer_of_all_that_its_sender_may_claim_counts():
    machine = machine_of(0)
    for sender, tokens in ((1, 200), (2, 400)):
        machine.receive(0.1, sender, offer(tokens))
    assert {1, 2} == set(machine.content.offers)


@pytest.mark.parametrize(("prior", "tokens"), [(PRIOR, 200), (Precedent(1000, hash=None), 100)])
def test_a_peer_leaves_out_of_its_own_offer_what_it_may_not_claim(prior, tokens):
    machine = machine_of(1, prior)
    machine.offer(0.1, offer(tokens=10**6, weight=50.0))
    mine = machine.content.offers[1]
    assert (mine.tokens, mine.weight) == (tokens, 1.0)


def test_a_list_names_the_state_from_which_its_members_began_or_nobody_accepts_it():
    machine = machine_of(2)
    for sender in (0, 1):
        machine.receive(0.1, sender, msgspec.structs.replace(offer(), state=b"ours"))
    for close in (EMPTY, TWO):
        with pytest.raises(BadCloseList, match="a state from which its members did not begin"):
            machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), changed(close, state=b"theirs")))
    machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), changed(TWO, state=b"ours")))
    assert machine.closing.decision.accepted is not None


def test_a_member_without_any_offer_yet_accepts_any_state():
    """It cannot tell, and would hold up the others otherwise."""
    machine = machine_of(2)
    machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), changed(TWO, state=b"ours")))
    assert machine.closing.decision.accepted is not None


EMPTY = CloseList((), (), 1000, previous=PRIOR.hash, **following(()))
ITEM = RoundItem(0, digest_of(b"mean"), 5, mask_of([0, 1]))
TWO = CloseList(
    (ITEM,),
    ((0, 1.0), (1, 1.0)),
    1300,
    previous=PRIOR.hash,
    **following({0, 1}),
)


def changed(close, **change):
    return msgspec.msgpack.encode(msgspec.structs.replace(close, **change))


@pytest.mark.parametrize("close", [EMPTY, TWO])
def test_a_list_that_follows_from_the_one_before_is_accepted(close):
    machine = machine_of(2)
    machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), changed(close)))
    assert machine.closing.decision.accepted == ((0, 0), changed(close))


LIES = {
    "an empty list ends the run": changed(EMPTY, tokens=2**60),
    "a token more than its members may claim": changed(TWO, tokens=1301),
    "fewer tokens than before": changed(TWO, tokens=999),
    "a weight": changed(TWO, members=((0, 1.0), (1, 2.0))),
}
STRAYS = {
    "another list before": changed(TWO, previous=list_hash(b"another")),
    "no list before": changed(TWO, previous=b""),
    "a member that it counts was idle": changed(TWO, idle=PRIOR.idle_after(PEERS, {0})),
    "all are entitled to the most": changed(TWO, idle=bytes([8, 8, 8])),
    "nobody was idle": changed(TWO, idle=b""),
    "nobody was counted": changed(TWO, counted=b""),
    "a member was counted more often": changed(TWO, counted=bytes([6, 255, 0])),
    "a member that it names was not counted": changed(TWO, counted=PRIOR.counted_after(PEERS, {0})),
}


@pytest.mark.parametrize("raw", [*LIES.values(), *STRAYS.values()], ids=[*LIES, *STRAYS])
def test_a_list_that_does_not_follow_from_the_one_before_is_accepted_by_nobody(raw):
    machine = machine_of(2)
    kind = NotEntitled if raw in LIES.values() else BadCloseList
    with pytest.raises(kind):
        machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), raw))
    with pytest.raises(BadCloseList) as refused:
        machine.receive(0.1, 0, Promise(KEY, VIEW, (1, 2), (0, 0), raw))
    assert refused.type is not NotEntitled, "a promise may have come before the list before it"
    assert machine.closing.decision.accepted is None


@pytest.mark.parametrize("raw", LIES.values(), ids=LIES)
def test_where_the_list_before_is_unknown_the_bounds_hold_and_nobody_is_accused(raw):
    machine = machine_of(2, Precedent(1000, hash=None))
    if raw == LIES["a token more than its members may claim"]:
        machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), raw))  # eight rounds are let through
        return
    with pytest.raises(BadCloseList) as refused:
        machine.receive(0.1, 0, Propose(KEY, VIEW, (0, 0), raw))
    assert refused.type is BadCloseList
