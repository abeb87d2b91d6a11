"""Lies that a member proposes to its group: close lists that could not be applied, and
announcements of content that cannot exist."""

import hashlib

import msgspec
import pytest
from worlds.collective import one_shard_each

from farflock.swarm.messages import Decided, Evaluation, Key, Offer, Promise, Propose, Reduced
from farflock.swarm.protocol.exchange.actions import Fetch
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import (
    MAX_BUNDLE_SHARDS,
    MAX_GATHER_BUNDLES,
    MAX_MEAN_BUNDLES,
)
from farflock.swarm.protocol.exchange.close_list import (
    BadCloseList,
    CloseList,
    RoundTerms,
    decode_close_list,
)
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.roster import Roster

KEY, VIEW = Key("weights", 3), bytes(32)
DEADLINE_S = 20.0
STATE, OTHER_STATE = b"s" * 32, b"t" * 32


TERMS = RoundTerms("mean", 2, DEADLINE_S)
GATHER = one_shard_each(RoundTerms("gather", 2, DEADLINE_S))


def digest_of(content):
    return hashlib.sha256(content).digest()


def mask(*members):
    return sum(1 << member for member in members).to_bytes(8, "little")


def items(*masks, first=0):
    return tuple(
        RoundItem(first + index, digest_of(b"%d" % index), 5, entry)
        for index, entry in enumerate(masks)
    )


def wire_of(close):
    return msgspec.msgpack.encode(close)


GOOD = CloseList(items(mask(0, 1), mask(1)), ((0, 1.0), (1, 2.0)), 5)
EVALUATION = Evaluation(2, 640, 2.5, 0.125, 3.5)
MEASURED = CloseList(GOOD.items, GOOD.members, 5, STATE, ((0, EVALUATION), (1, EVALUATION)))
GATHERED = CloseList(items(mask(1), mask(1), first=2), ((1, 2.0),), 5)


def evaluated(*values):
    return msgspec.structs.replace(MEASURED, evaluations=values)


def test_sound_lists_pass():
    for close, terms in (
        (GOOD, TERMS),
        (MEASURED, TERMS),
        (GATHERED, GATHER),
        (CloseList((), (), 5), TERMS),
        (CloseList((), (), 0), GATHER),
    ):
        assert decode_close_list(wire_of(close), terms, range(2)) == close


@pytest.mark.parametrize(
    ("raw", "terms"),
    [
        (b"", TERMS),
        (b"\xc0", TERMS),
        (wire_of(GOOD)[:-1], TERMS),
        (b"\x95" + wire_of(GOOD)[1:] + b"\x91" * 100_000, TERMS),
        (wire_of(CloseList(GOOD.items[:1], GOOD.members, 5)), TERMS),
        (wire_of(CloseList(GOOD.items[::-1], GOOD.members, 5)), TERMS),
        (wire_of(CloseList((GOOD.items[0],) * 2, ((0, 1.0), (1, 1.0)), 5)), TERMS),
        (wire_of(CloseList(GOOD.items, GOOD.members[:1], 5)), TERMS),
        (wire_of(CloseList(GOOD.items, (*GOOD.members, (2, 1.0)), 5)), TERMS),
        (wire_of(CloseList(GOOD.items, (GOOD.members[0],) * 2, 5)), TERMS),
        (wire_of(CloseList(items(mask(0, 2), mask(0)), ((0, 1.0), (2, 1.0)), 5)), TERMS),
        (wire_of(CloseList(items(mask(0), mask()), ((0, 1.0),), 5)), TERMS),
        (wire_of(CloseList((), GOOD.members, 5)), TERMS),
        (wire_of(CloseList(GOOD.items, ((0, float("nan")), (1, 1.0)), 5)), TERMS),
        (wire_of(CloseList(GOOD.items, ((0, float("inf")), (1, 1.0)), 5)), TERMS),
        (wire_of(CloseList(GOOD.items, ((0, -1.0), (1, 1.0)), 5)), TERMS),
        (wire_of(evaluated((1, EVALUATION), (0, EVALUATION))), TERMS),
        (wire_of(evaluated((0, EVALUATION), (0, EVALUATION))), TERMS),
        (wire_of(evaluated((2, EVALUATION))), TERMS),
        (wire_of(evaluated((0, Evaluation(2, 640, 2.5, float("nan"))))), TERMS),
        (wire_of(GOOD), GATHER),
        (wire_of(CloseList(GATHERED.items[:1], GATHERED.members, 5)), GATHER),
        (wire_of(CloseList(items(mask(0), mask(0), first=2), ((0, 1.0),), 5)), GATHER),
        (wire_of(CloseList(items(mask(1), mask(0, 1), first=2), ((0, 1.0), (1, 1.0)), 5)), GATHER),
    ],
)  # fmt: skip
def test_a_list_that_could_not_be_applied_is_refused_wherever_it_comes_from(raw, terms):
    with pytest.raises(BadCloseList):
        decode_close_list(raw, terms, range(2))
    for message in (
        Propose(KEY, VIEW, (0, 0), raw),
        Promise(KEY, VIEW, (1, 1), (0, 0), raw),
        Decided(KEY, VIEW, raw, (0, 0), ((0, b""), (1, b""))),
    ):
        machine = Collective(KEY, VIEW, Roster(("a", "b"), 1, (0, 1)), terms, 0.0)
        with pytest.raises(BadCloseList):
            machine.receive(0.1, 0, message)
        assert machine.closing.decision.accepted is None
        assert machine.close is None


def test_an_announcement_of_an_impossible_shard_or_member_is_ignored():
    machine = Collective(KEY, VIEW, Roster(("a", "b"), 1, (0, 1)), TERMS, 0.0)
    for shard, entry in ((2, mask(0)), (0, mask(2)), (0, mask())):
        machine.receive(0.1, 0, Reduced(KEY, VIEW, shard, digest_of(b"x"), 5, entry))
    assert not any(machine.content.availability.rivals)


def test_an_offer_of_another_number_of_shards_is_ignored():
    machine = Collective(KEY, VIEW, Roster(("a", "b"), 1, (0, 1)), TERMS, 0.0)
    machine.receive(0.1, 0, Offer(KEY, VIEW, (digest_of(b"x"),), (5,), 1.0, 0))
    assert not machine.content.offers


def test_rival_announcements_of_one_shard_are_bounded():
    machine = Collective(KEY, VIEW, Roster(("a", "b"), 1, (0, 1)), TERMS, 0.0)
    for number in range(1000):
        machine.receive(0.1, 0, Reduced(KEY, VIEW, 0, digest_of(b"%d" % number), 5, mask(0)))
    assert len(machine.content.availability.rivals[0]) <= 2
    assert sum(isinstance(action, Fetch) for action in machine.take()) <= 2


def test_the_largest_close_lists_fit_one_value():
    from farflock.swarm.messages import MAX_MEMBERS, MAX_VALUE_BYTES

    everybody = mask(*range(MAX_MEMBERS))
    bundles = MAX_MEAN_BUNDLES
    rows = tuple(RoundItem(bundle, bytes(32), 2**22, everybody) for bundle in range(bundles))
    weights = tuple((member, 1.5) for member in range(MAX_MEMBERS))
    said = tuple((member, Evaluation(2**62, 2**62, 1e6, 1e6, 1e6)) for member in range(MAX_MEMBERS))
    close = CloseList(rows, weights, 2**62, STATE, said)
    assert len(wire_of(close)) <= MAX_VALUE_BYTES
    assert (
        decode_close_list(wire_of(close), RoundTerms("mean", 10**6, 1.0), range(MAX_MEMBERS))
        == close
    )
    bundles = MAX_GATHER_BUNDLES
    rows = tuple(
        RoundItem(index, bytes(32), 2**22, mask(index // bundles))
        for index in range(MAX_MEMBERS * bundles)
    )
    close = CloseList(rows, close.members, 2**62, STATE)
    assert len(wire_of(close)) <= MAX_VALUE_BYTES
    assert (
        decode_close_list(
            wire_of(close),
            RoundTerms("gather", bundles * MAX_BUNDLE_SHARDS, 1.0),
            range(MAX_MEMBERS),
        )
        == close
    )
