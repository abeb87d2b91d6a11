"""Rounds over whole peers: one log for all, nothing counted twice, nothing held for ever, and no
liar believed."""

import asyncio
import collections
import dataclasses
import json

import msgspec
import pytest
from worlds.herd import SHARDS, STREAM, identity, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.frame import Frame, unpack
from farflock.swarm.messages import (
    Decided,
    Forgotten,
    Key,
    LogQuery,
    Offer,
    Piece,
    Promise,
    Propose,
    Views,
    Want,
)
from farflock.swarm.peer import round_log
from farflock.swarm.peer.catch_up import ANSWERS_BURST, ANSWERS_PER_S, DECISIONS_PER_ANSWER
from farflock.swarm.peer.round_log import LOG_ROUNDS, work_pin
from farflock.swarm.protocol import views
from farflock.swarm.protocol.decide import signed_text
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, Stream
from farflock.swarm.protocol.views import Certified, View, signature_domain, view_key
from farflock.swarm.sim.network import Faults, LinkModel

KINDS = pytest.mark.parametrize("kind", ["mean", "gather"])


async def calm(herd, *numbers):
    """Let these nodes finish their rounds and begin no more."""
    for number in numbers:
        herd.nodes[number].quiet = True
    await asyncio.sleep(3)


@pytest.mark.parametrize(("kind", "seed"), [("mean", 0), ("gather", 1)])
def test_under_loss_doubling_and_reordering_rounds_go_on_and_every_law_holds(kind, seed):
    @in_virtual_time(4, seed=seed, kind=kind)
    async def main(herd):
        herd.network.faults = Faults(loss=0.05, duplicate=0.05, reorder=0.1, corrupt=0.01)
        start = herd.nodes[0].applied
        await until(
            lambda: min(node.applied for node in herd.nodes.values()) > start + 15,
            150,
            "fifteen rounds",
        )
        assert herd.network.fired["loss"] > 50
        assert sum(len(participants) for _, participants, _, _ in herd.results.values()) > 3 * 15

    main()


@KINDS
def test_a_stream_with_a_stride_has_its_own_rounds_of_the_axis_and_every_law_holds(kind):
    @in_virtual_time(4, seed=7, kind=kind, first=2, stride=5)
    async def main(herd):
        herd.network.faults = Faults(loss=0.05, duplicate=0.05, reorder=0.1)
        await asyncio.sleep(5)
        herd.kill(2)
        await asyncio.sleep(12)
        newcomer, start = herd.start(2), max(herd.results)
        await until(lambda: newcomer.applied > start + 15, 60, "three rounds with the newcomer")
        assert {number % 5 for number in herd.results} == {2}
        assert set(herd.results) == set(range(2, max(herd.results) + 1, 5))
        assert herd.nodes[0].peer.context.views.newest.first_round > 2

    main()


@in_virtual_time(4, kind="gather", enough=1)
async def test_a_gather_with_enough_closes_with_the_first_and_the_slow_join_in_later_rounds(herd):
    """No member waits for the others; what was not in a round goes into a later one, and every
    member has every round."""
    start = herd.nodes[0].applied
    for number in (1, 2, 3):
        herd.nodes[number].quiet = True
    await until(lambda: herd.nodes[0].applied > start + 8, 30, "eight rounds of one peer")
    assert herd.nodes[0].applied - start >= 8
    for number in (1, 2, 3):
        herd.nodes[number].quiet = False
    mark = max(herd.results)
    await until(
        lambda: min(node.applied for node in herd.nodes.values()) > mark + 12, 60, "all go on"
    )
    sizes = {len(participants) for _, participants, _, _ in herd.results.values() if participants}
    assert 1 in sizes
    together = [
        participants for number, (_, participants, _, _) in herd.results.items() if number > mark
    ]
    assert len({peer for participants in together for peer in participants}) > 1


@in_virtual_time(4, kind="gather", enough=1)
async def test_a_member_behind_the_log_adopts_the_newest_state_although_most_are_as_far_behind(
    herd,
):
    for number in (1, 2, 3):
        herd.nodes[number].quiet = True
    await until(
        lambda: herd.nodes[0].applied > herd.nodes[1].applied + 2 * LOG_ROUNDS,
        60,
        "a lead beyond the log",
    )
    behind = [herd.nodes[number].applied for number in (1, 2, 3)]
    for number in (1, 2, 3):
        herd.nodes[number].quiet = False
    await until(
        lambda: min(node.applied for node in herd.nodes.values()) > max(behind) + 2 * LOG_ROUNDS,
        30,
        "all go on",
    )
    assert herd.nodes[1].peer.context.counters["dropped: stale snapshot"] > 0


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("seed", range(100, 140))
def test_the_same_for_longer_with_deaths_and_returns(kind, seed):
    @in_virtual_time(5, seed=seed, kind=kind)
    async def main(herd):
        herd.network.faults = Faults(loss=0.05, duplicate=0.05, reorder=0.1, corrupt=0.01)
        for victim in (1, 4, 0, 3):
            await asyncio.sleep(8)
            herd.kill(victim)
            await asyncio.sleep(6)
            herd.start(victim)
        start = max(herd.results)
        await until(
            lambda: min(node.applied for node in herd.nodes.values()) > start + 5,
            120,
            "progress at the end",
        )

    main()


@in_virtual_time(4)
async def test_over_a_hundred_rounds_nothing_grows(herd):
    herd.padding = 20_000
    for node in herd.nodes.values():
        node.peer.context.store.budget_bytes = 0  # only what is pinned stays
    herd.pace_s = 0.2

    def sizes():
        return [
            size
            for node in herd.nodes.values()
            for store in [node.peer.context.store]
            for size in (
                store.size_bytes,
                store.pinned_chunks,
                len(store.pins),
                len(node.peer.tasks),
                len(node.peer.rounds.machines),
                len(node.peer.rounds.streams[STREAM].log),
                len(node.peer.context.counters),
            )
        ]

    async def peak(rounds):
        goal, highest = min(node.applied for node in herd.nodes.values()) + rounds, [0] * 28
        while min(node.applied for node in herd.nodes.values()) < goal:
            await asyncio.sleep(0.1)
            highest = [max(pair) for pair in zip(highest, sizes(), strict=True)]
        return highest

    early, late = await peak(20), await peak(90)
    assert all(after <= 2 * before + 3 for before, after in zip(early, late, strict=True)), (
        early,
        late,
    )
    assert max(late[3::7]) < 60, "tasks"
    assert set(late[5::7]) == {LOG_ROUNDS}
    await calm(herd, 0, 1, 2, 3)
    for node in herd.nodes.values():
        pins = {
            pin
            for pin in node.peer.context.store.pins
            if not (isinstance(pin, tuple) and pin[0] == "snapshot")
        }
        assert pins <= {
            Key(STREAM, number) for number in range(node.applied - LOG_ROUNDS + 1, node.applied + 1)
        }, "something is pinned that no round in the log and no snapshot needs"


@in_virtual_time(3)
async def test_nothing_stays_pinned_for_a_round_that_was_decided_before_it_was_asked_for(herd):
    node = herd.nodes[2]
    await calm(herd, 2)
    behind = node.applied
    await until(lambda: herd.nodes[0].applied > behind + 2, 30, "rounds without it")
    await until(lambda: node.peer.decided(STREAM, behind + 1) is not None, 10, "news of them")
    payload = [b'{"name": "late"}'] * SHARDS
    outcome = await node.peer.exchange(STREAM, behind + 1, payload)
    assert outcome.participants
    assert outcome.taken == (False,) * SHARDS
    assert work_pin(Key(STREAM, behind + 1)) not in node.peer.context.store.pins


@in_virtual_time(3)
async def test_nothing_stays_pinned_for_a_round_that_is_lost_or_was_given_up_by_its_caller(herd):
    node = herd.nodes[2]
    await calm(herd, 0, 1, 2)
    number = node.applied + 5
    task = asyncio.create_task(node.peer.exchange(STREAM, number, [b"{}"] * SHARDS))
    await asyncio.sleep(0.2)
    assert work_pin(Key(STREAM, number)) in node.peer.context.store.pins
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert work_pin(Key(STREAM, number)) not in node.peer.context.store.pins
    task = asyncio.create_task(node.peer.exchange(STREAM, number, [b"{}"] * SHARDS))
    await asyncio.sleep(0.2)
    for other in (herd.nodes[0], herd.nodes[1]):
        node.peer.rounds.receive(
            other.id,
            other.incarnation,
            Forgotten(Key(STREAM, node.applied + 1), number, number + 9),
        )
    assert (await task).status == "lost"
    assert work_pin(Key(STREAM, number)) not in node.peer.context.store.pins


@in_virtual_time(4)
async def test_a_member_that_lost_a_round_adopts_no_state_from_before_it(herd):
    """Others that lag behind offer their states, and are perhaps the first to do so."""
    node = herd.nodes[2]
    await calm(herd, 0, 1, 2, 3)
    lost = node.applied + 1
    assert node.peer.reach() < lost
    for other, oldest in ((herd.nodes[0], lost + 4), (herd.nodes[1], lost + 6)):
        word = Forgotten(Key(STREAM, lost), oldest, lost + 9)
        node.peer.rounds.receive(other.id, other.incarnation, word)
    assert node.peer.reach() == lost + 3
    node.peer.open(dataclasses.replace(herd.stream, name="other"), herd.stream.cadence.upto(-1))
    assert node.peer.reach() == lost + 3, "whatever the method's other streams have still"


@in_virtual_time(4)
async def test_the_word_of_one_member_loses_no_round(herd):
    node, liar = herd.nodes[2], herd.nodes[0]
    await calm(herd, 0, 1, 2, 3)
    number = node.applied + 5
    task = asyncio.create_task(node.peer.exchange(STREAM, number, [b"{}"] * SHARDS))
    await asyncio.sleep(0.2)
    for newest in (number, 10**6):
        lie = Forgotten(Key(STREAM, node.applied + 1), number, newest)
        node.peer.rounds.receive(liar.id, liar.incarnation, lie)
        await asyncio.sleep(4.0)
        assert not task.done()
    assert node.peer.context.counters["lost rounds"] == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time(3)
async def test_a_round_whose_content_no_peer_can_deliver_ends_as_lost_when_it_leaves_the_log(herd):
    """One peer gets no payload for a while: its exchange must not wait for ever for content that
    all have dropped."""
    node = herd.nodes[2]

    def starve(when_s, sender, to, packed):
        return None if to == node.id and isinstance(unpack(packed).message, Piece) else packed

    for other in herd.nodes.values():
        other.peer.context.store.budget_bytes = 0
    herd.network.tap = starve
    before = node.applied
    await until(
        lambda: herd.nodes[0].applied > before + LOG_ROUNDS + 4, 200, "rounds that it cannot follow"
    )
    herd.network.tap = None
    await until(lambda: any(event[2] == "lost" for event in node.events), 20, "its being lost")
    assert node.peer.decided(STREAM, before + 1).status == "lost"
    assert node.peer.has_passed(STREAM, before + 1)
    assert not node.peer.has_passed(STREAM, herd.nodes[0].applied + LOG_ROUNDS)
    await until(lambda: node.applied >= herd.nodes[0].applied - 2, 30, "its return")
    await until(lambda: len(node.peer.rounds.machines) <= 2, 10, "the end of rounds from before")


@in_virtual_time(3)
async def test_a_round_begun_under_a_view_that_does_not_hold_for_it_is_begun_again(
    herd,
):
    """The proposer of a view may lag one round behind: then another member can have begun, under
    the old view, the very round with which the new one begins. The indices of members differ
    between the two."""
    await calm(herd, 0, 1, 2)
    early = herd.nodes[2]
    number = early.applied + 1
    task = asyncio.create_task(early.step())
    await asyncio.sleep(0)
    old = early.peer.context.views.newest
    assert early.peer.rounds.machines.get(Key(STREAM, number)).view == old.hash
    view = View(old.number + 1, old.hash, number, old.members[::-1])
    text = signed_text(view_key(view.number), (1, 0), views.encode(view))
    signers = {identity(n).peer: identity(n) for n in range(3)}
    proofs = tuple(
        (i, signers[peer].sign(signature_domain("run"), text)) for i, peer in enumerate(old.peers)
    )
    blob = views.encode(Certified(view, (1, 0), proofs))
    for node in herd.nodes.values():
        node.peer.membership.receive(early.id, early.incarnation, Views((blob,)))
        assert node.view == view
    herd.nodes[0].quiet = herd.nodes[1].quiet = False
    await task
    await until(lambda: number in herd.results, 20, "the round")
    assert herd.results[number][1] == tuple(sorted(view.peers)), (
        "everybody's contribution, the early one's too"
    )
    assert early.events[-1][2] == "ok"


# Liars among the members.


def close_of(item_count, members):
    mask = sum(1 << member for member in members).to_bytes(8, "little")
    items = tuple(RoundItem(shard, bytes([shard]) * 32, 10, mask) for shard in range(item_count))
    return msgspec.msgpack.encode(
        CloseList(items, tuple((member, 1.0) for member in members), 10**6)
    )


BAD_VALUES = {
    "nonsense": b"\xc1",
    "text": b"\xa2\xff\xff",
    "deep": b"\x95" + b"\x90" * 2 + b"\x00\xc4\x00" + b"\x91" * 10_000,
    "too few shards": close_of(SHARDS - 1, (0, 1)),
    "too many shards": close_of(SHARDS + 1, (0, 1)),
    "a member that does not exist": close_of(SHARDS, (0, 7)),
    "nobody's": close_of(SHARDS, ()),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_member_that_puts_forward_or_announces_nonsense_is_ignored_and_the_round_goes_on(value):
    @in_virtual_time(3)
    async def main(herd):
        liar, node = herd.nodes[1], herd.nodes[0]
        await calm(herd, 0, 1, 2)
        key, digest = Key(STREAM, node.applied + 1), node.view.hash
        me = node.view.index(liar.id, liar.incarnation)
        lies = (
            Propose(key, digest, (9, me), value),
            Promise(key, digest, (0, 0), (9, me), value),
            Decided(key, digest, value, (0, 0), ((0, b""), (1, b""), (2, b""))),
        )
        for lie in lies:  # with no machine yet
            node.peer.router.deliver(liar.id, Frame(liar.incarnation, lie))
        for other in herd.nodes.values():
            other.quiet = False
        await asyncio.sleep(1.05)
        for lie in lies:  # and with one
            node.peer.router.deliver(liar.id, Frame(liar.incarnation, lie))
        await until(lambda: node.applied > key.round, 15, "the round")
        assert node.peer.context.counters["dropped: bad close list"] >= 3
        assert not any(event[2] in ("lost", "failed") for event in node.events)

    main()


@in_virtual_time(3)
async def test_an_item_larger_than_a_shard_may_be_is_not_fetched(herd):
    node, liar = herd.nodes[0], herd.nodes[1]
    await calm(herd, 0, 1, 2)
    huge = RoundItem(0, bytes(32), 4 * 2**20, bytes([3]) + bytes(7))
    items = (huge, *(msgspec.structs.replace(huge, index=shard) for shard in (1, 2)))
    value = msgspec.msgpack.encode(CloseList(items, ((0, 1.0), (1, 1.0)), 10))
    wants = []
    herd.network.tap = lambda when_s, sender, to, packed: (
        (wants.append(packed) if isinstance(unpack(packed).message, Want) else None) or packed
    )
    lie = Decided(
        Key(STREAM, node.applied + 1), node.view.hash, value, (0, 0), ((0, b""), (1, b""), (2, b""))
    )
    node.peer.router.deliver(liar.id, Frame(liar.incarnation, lie))
    await asyncio.sleep(2)
    assert node.peer.context.counters["dropped: item too large"] == 1
    assert not wants


@in_virtual_time(4)
async def test_a_log_over_its_bytes_keeps_fewer_rounds_and_a_member_that_was_away_adopts(herd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_log, "MAX_LOG_BYTES", 1)
        away, lead = herd.nodes[3], herd.nodes[0]
        before, away.quiet = away.applied, True
        await until(lambda: lead.applied > before + 3, 60, "a lead of less than the log's rounds")
        away.quiet = False
        await until(
            lambda: min(node.applied for node in herd.nodes.values()) > before + 6, 60, "all go on"
        )
        for node in herd.nodes.values():
            (state,) = node.peer.rounds.streams.values()
            await until(
                lambda node=node, state=state: list(state.log) == [node.applied],
                20,
                "a log of the newest round, whatever its size, once the node has applied it",
            )


@in_virtual_time(3)
async def test_a_round_leaves_no_contribution_in_the_store_and_its_result_in_a_file(herd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_log, "MIN_SHELVED_BYTES", 1)
        node, moved, offered = herd.nodes[0], [], set()
        send = node.peer.context.links.send

        async def shelve(chunks):
            moved.extend(bytes(chunk) for chunk in chunks)
            return [memoryview(bytearray(chunk)) for chunk in chunks]

        def noting(peer, packed):
            if isinstance(message := unpack(packed).message, Offer):
                offered.update(message.digests)
            return send(peer, packed)

        node.peer.context.shelve, node.peer.context.links.send = shelve, noting
        before = node.applied
        await until(lambda: node.applied > before + 3, 60, "rounds")
        await calm(herd, 0, 1, 2)
    store, (state,) = node.peer.context.store, node.peer.rounds.streams.values()
    newest = [item.digest for item in state.log[node.applied].close.items]
    assert offered
    assert not any(digest in store for digest in offered)
    assert {store.get(digest) for digest in newest} <= set(moved)
    assert all(isinstance(store.view(digest).obj, bytearray) for digest in newest)


# Questions about the log.


@in_virtual_time(3)
async def test_a_question_about_the_log_is_answered_with_the_decision_or_with_how_far_it_reaches(
    herd,
):
    node, answers = herd.nodes[0], []
    await until(lambda: node.applied > LOG_ROUNDS + 2, 40, "a full log")
    await calm(herd, 0, 1, 2)
    send = node.peer.context.links.send
    node.peer.context.links.send = lambda peer, packed: (
        answers.append(unpack(packed).message) or send(peer, packed)
    )
    for number in (node.applied, 0, node.applied + 1):
        node.peer.rounds.receive(
            herd.nodes[1].id, herd.nodes[1].incarnation, LogQuery(Key(STREAM, number))
        )
    told = [message for message in answers if isinstance(message, Decided | Forgotten)]
    assert [type(message) for message in told] == [Decided, Forgotten]
    assert told[0].key.round == node.applied
    assert (told[1].oldest, told[1].newest) == (node.applied - LOG_ROUNDS + 1, node.applied)


@in_virtual_time(3)
async def test_a_peer_that_asks_about_the_log_without_end_is_answered_only_so_often(herd):
    node, answers = herd.nodes[0], collections.Counter()
    await until(lambda: node.applied > LOG_ROUNDS, 40, "a full log")
    await calm(herd, 0, 1, 2)
    node.peer.context.links.send = lambda peer, packed: answers.update(
        [peer] if isinstance(unpack(packed).message, Decided) else []
    )

    def ask(asker, times):
        for _ in range(times):
            node.peer.rounds.receive(
                asker.id, asker.incarnation, LogQuery(Key(STREAM, node.applied - 4))
            )
        return answers.pop(asker.id, 0)

    first = ask(herd.nodes[1], 5000)
    assert 0 < first <= DECISIONS_PER_ANSWER * ANSWERS_BURST
    assert ask(herd.nodes[1], 100) == 0
    assert ask(herd.nodes[2], 1) == DECISIONS_PER_ANSWER, "another asker has its own share"
    assert node.peer.context.counters["dropped: too many questions about the log"] > 100
    await asyncio.sleep(1.0)
    assert 0 < ask(herd.nodes[1], 5000) <= 2 * DECISIONS_PER_ANSWER * ANSWERS_PER_S


@in_virtual_time(4)
async def test_a_member_asks_for_missed_rounds_once_it_hears_of_them(herd):
    late, others = herd.nodes[3], [herd.nodes[number] for number in range(3)]
    await calm(herd, 3)
    herd.network.partition({late.peer.me}, {node.peer.me for node in others})
    await until(lambda: others[0].applied > late.applied + 1, 30, "two rounds without it")
    await calm(herd, 0, 1, 2)
    herd.network.heal()
    await asyncio.sleep(30)
    there, here = others[0].peer.rounds.newest(STREAM), late.peer.rounds.newest(STREAM)
    assert here < there
    late.peer.rounds.heard_of(STREAM, there + 1)
    late.peer.rounds.heard_of(STREAM, 0)
    await until(lambda: late.peer.rounds.newest(STREAM) == there, 10, "all of them")


@in_virtual_time(2)
async def test_an_unknown_stream_is_dropped_and_counted(herd):
    node = herd.nodes[0]
    offer = Offer(Key("unheard-of", 0), node.view.hash, (), (), 1.0, 0)
    node.peer.router.deliver(herd.nodes[1].id, Frame(herd.nodes[1].incarnation, offer))
    assert node.peer.context.counters["dropped: unknown stream"] == 1


@in_virtual_time(3)
async def test_corrupt_payloads_are_left_out_of_the_mean_and_counted(herd):
    """`reduce` says whose payloads were corrupt; they are not in the result, and their owner is
    told so."""
    await calm(herd, 0, 1, 2)

    def picky(number, shard, inputs):
        good = [entry for entry in inputs if b"rotten" not in entry[2]]
        rejected = tuple(peer for peer, _, data in inputs if b"rotten" in data)
        return Reduction(herd.stream.reduce(number, shard, good).data if good else None, rejected)

    for node in herd.nodes.values():
        state = node.peer.rounds.streams[STREAM]
        state.stream = dataclasses.replace(state.stream, reduce=picky)
    number = herd.nodes[0].applied + 1
    offers = [
        [json.dumps({"name": word}).encode()] * SHARDS for word in ("fresh", "rotten", "ripe")
    ]
    outcomes = await asyncio.gather(
        *(
            node.peer.exchange(STREAM, number, offer, state=node.state)
            for node, offer in zip(herd.nodes.values(), offers, strict=True)
        )
    )
    assert [outcome.status for outcome in outcomes] == ["partial"] * 3
    assert [outcome.taken[0] for outcome in outcomes] == [True, False, True]
    assert json.loads(outcomes[0].reduced[0])["names"] == ["fresh", "ripe"]
    assert (
        sum(node.peer.context.counters["corrupt payloads"] for node in herd.nodes.values())
        == SHARDS
    )
    for node in herd.nodes.values():
        node.applied = number


@in_virtual_time(4, link=LinkModel(up_bytes_per_s=1.25e6, down_bytes_per_s=1.25e6))
async def test_on_a_slow_link_a_round_takes_hardly_longer_than_its_bytes(herd):
    """A mean of n members moves 2 (n - 1) / n of the payload up each line; the rest is waiting."""
    herd.padding = 90_000
    node = herd.nodes[0]
    await calm(herd, 0, 1, 2, 3)
    began = now()
    for other in herd.nodes.values():
        other.quiet = False
    goal = node.applied + 3
    await until(lambda: node.applied >= goal, 30, "three rounds")
    ideal_s = 2 * 0.75 * SHARDS * 90_000 / 1.25e6
    assert now() - began < 3 * (herd.pace_s + 2 * ideal_s + 0.5)


@pytest.mark.parametrize(
    ("kind", "group", "most"),
    [("mean", 0, 128 * 65_536), ("gather", 0, 64 * 65_536), ("gather", 2, 64 * 65_536)],
)
def test_a_stream_with_more_shards_than_a_close_list_can_name_is_refused(kind, group, most):
    def made(shards):
        terms = RoundTerms(kind, shards, group=group)
        return Stream("s", terms, 10, lambda *inputs: Reduction(None), lambda *payload: True)

    assert made(most).terms.shards == most
    for shards in (0, most + 1):
        with pytest.raises(ValueError, match=f"1 to {most} shards, got {shards}"):
            made(shards)
