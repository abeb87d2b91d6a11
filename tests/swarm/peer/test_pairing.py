"""Pairs over the simulated network: which peers meet, what each side gets, and how strayed partners
meet again."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from worlds.collective import one_shard_each
from worlds.switchboard import Spawner
from worlds.waiting import now

from farflock.swarm.chunk_store import Store
from farflock.swarm.frame import unpack
from farflock.swarm.messages import (
    Key,
    Miss,
    Offer,
    PairAbort,
    PairAccept,
    PairCommit,
    PairHave,
    PairPropose,
    PairRefuse,
    Piece,
    Want,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.pairing import DONE_KEPT, MAX_JUMP, Pairing
from farflock.swarm.peer.round_log import work_pin
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Cadence, Reduction, Stream
from farflock.swarm.protocol.groups import group_of
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.roles import EVERY
from farflock.swarm.sim.network import Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

NAME = "pairs"
SHARDS, SHARD_BYTES = 2, 150_000
DEADLINE_S = 10.0


def shards_of(name, number):
    return [f"{name} {number} {shard} ".encode() * 10_000 for shard in range(SHARDS)]


class Peer:
    """One member's pairing, with the loop that feeds it."""

    def __init__(self, world, name, view, incarnation):
        self.name, self.links, self.store = name, world.network.links(name), Store(0)
        self.context = PeerContext("run", 5, incarnation, self.links, self.store, world.spawn)
        self.context.chain = Chain("run", [Certified(view)])
        self.pairing = Pairing(self.context)
        self.heard, self.keeps = [], lambda message: True
        self.check = lambda number, shard, data: True
        self.stream = Stream(
            NAME,
            one_shard_each(RoundTerms("gather", SHARDS, DEADLINE_S, group=2)),
            SHARD_BYTES,
            lambda *_: Reduction(None),
            self.checked,
        )
        self.pairing.open(self.stream)
        world.spawn(self.receive())

    def checked(self, number, shard, data):
        return self.check(number, shard, data)

    async def receive(self):
        while True:
            sender, packed = await self.links.receive()
            frame = unpack(packed)
            if isinstance(frame.message, Want | Piece | Miss):
                self.context.chunks.receive(sender, frame.message, frame.body)
            elif self.keeps(frame.message):
                self.heard.append(frame.message)
                self.pairing.receive(sender, frame.incarnation, frame.message)

    def offer(self, number, tokens=0, weight=1.0):
        """This member's payloads for a round, put into the store as `Peer.exchange` does."""
        key = Key(NAME, number)
        payloads = shards_of(self.name, number)
        digests = tuple(self.store.put(payload, work_pin(key)) for payload in payloads)
        return Offer(key, bytes(32), digests, tuple(map(len, payloads)), weight, tokens)

    async def swap(self, number, **fields):
        return await self.pairing.exchange(NAME, self.offer(number, **fields))


class PairingWorld(Spawner):
    """Members of one view; the last two may serve a stage of their own."""

    def __init__(self, count=2, stages=(EVERY, EVERY)):
        super().__init__()
        self.network = SimNetwork(1)
        self.names = "abcde"[:count]
        serves = [stages[place >= count - 2] for place in range(count)]
        members = (Member(name, 1, stage) for name, stage in zip(self.names, serves, strict=True))
        self.view = View(0, bytes(32), 0, tuple(members))
        self.peers = {name: Peer(self, name, self.view, 1) for name in self.names}

    def roles(self, number=0):
        """The leader and the follower of a round of two."""
        order = group_of("a", self.names, 2, 5, self.view.hash, Key(NAME, number))
        return [self.peers[name] for name in order]

    def led_by(self, name, after=-1):
        """The first round after `after` that this one of two members leads."""
        return next(
            number for number in range(after + 1, 100) if self.roles(number)[0].name == name
        )


def in_a_world(*size, stages=(EVERY, EVERY)):
    """Run a test `main(world)` in virtual time; afterwards no store may hold anything."""

    def decorate(main):
        def test():
            async def whole():
                world = PairingWorld(*size, stages=stages)
                await main(world)
                await asyncio.sleep(2 * DEADLINE_S)
                assert not world.failures
                for peer in world.peers.values():
                    assert not peer.store.size_bytes, "something stayed pinned"
                    assert not peer.pairing.open_pairs

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


# A swap.


@in_a_world()
async def test_both_get_both_payloads_and_the_larger_count_of_tokens(world):
    a, b = world.peers.values()
    results = await asyncio.gather(
        a.swap(0, tokens=30, weight=1.0), b.swap(0, tokens=50, weight=3.0)
    )
    for result in results:
        assert (result.status, result.key, result.next_round) == ("ok", Key(NAME, 0), 1)
        assert (result.participants, result.weights) == (("a", "b"), (1.0, 3.0))
        assert result.gathered == {name: tuple(shards_of(name, 0)) for name in "ab"}
        assert (result.taken, result.tokens) == ((True, True), 50)
    assert now() < 2.0


@in_a_world(4)
async def test_four_meet_in_two_pairs_as_the_seed_says(world):
    results = await asyncio.gather(*(peer.swap(3) for peer in world.peers.values()))
    for peer, result in zip(world.peers.values(), results, strict=True):
        assert set(result.participants) == set(
            group_of(peer.name, "abcd", 2, 5, world.view.hash, Key(NAME, 3))
        )
        assert result.status == "ok"


@in_a_world(4, stages=(0, 1))
async def test_servers_of_a_stage_meet_each_other_and_nobody_else(world):
    for name, peer in world.peers.items():
        peer.stream = replace(peer.stream, stage=int(name in "cd"), cadence=Cadence(2, 3))
        peer.pairing.open(peer.stream)
    for number in (2, 5):
        results = await asyncio.gather(*(peer.swap(number) for peer in world.peers.values()))
        assert [result.participants for result in results] == [("a", "b")] * 2 + [("c", "d")] * 2
        assert {(result.status, result.next_round) for result in results} == {("ok", number + 3)}
    floors = [peer.context.floor for peer in world.peers.values()]
    assert floors == [(0, 6)] * 2 + [(0, 0, 6)] * 2, "rounds of a stage are on its axis"


@in_a_world()
async def test_a_pair_with_a_stride_that_jumps_ahead_lands_on_one_of_its_rounds(world):
    a, b = world.peers.values()
    for peer in (a, b):
        peer.pairing.open(replace(peer.stream, cadence=Cadence(2, 3)), 4)
    assert a.pairing.left_round(NAME) == 2
    ahead = asyncio.ensure_future(b.swap(14))
    await asyncio.sleep(0.5)
    late = await a.swap(5)
    assert late.status == "alone" or late.next_round == 14
    assert (late.next_round - 2) % 3 == 0
    assert (a.pairing.left_round(NAME) - 2) % 3 == 0
    assert (await ahead).next_round == 17


@in_a_world(3)
async def test_the_odd_one_is_alone_at_once_with_its_own_payload(world):
    odd = next(
        name
        for name in "abc"
        if len(group_of(name, "abc", 2, 5, world.view.hash, Key(NAME, 0))) == 1
    )
    result = await world.peers[odd].swap(0, tokens=7)
    assert (result.status, result.participants, result.tokens) == ("alone", (odd,), 7)
    assert result.gathered == {odd: tuple(shards_of(odd, 0))}
    assert now() == 0.0


@in_a_world()
async def test_rounds_follow_each_other_through_loss_doubling_and_reordering(world):
    world.network.faults = Faults(loss=0.1, duplicate=0.2, reorder=0.2)

    async def life(peer):
        statuses, number = [], 0
        while number < 20:
            result = await peer.swap(number)
            statuses.append(result.status)
            number = result.next_round
        return statuses

    lives = await asyncio.gather(*map(life, world.peers.values()))
    for statuses in lives:
        assert statuses.count("ok") >= 15


# No partner comes.


@in_a_world()
async def test_a_partner_that_is_dead_or_suspect_costs_no_time(world):
    a, _ = world.peers.values()
    world.network.kill("b")
    await asyncio.sleep(1.0)
    assert a.context.life("b") == "suspect"
    begun_s = now()
    assert (await a.swap(0)).status == "alone"
    assert now() == begun_s


@pytest.mark.parametrize("role", [0, 1], ids=["leader", "follower"])
def test_a_partner_that_does_not_come_is_waited_for_until_the_deadline_and_no_longer(role):
    async def main():
        world = PairingWorld()
        waiting, partner = world.roles()[role], world.roles()[1 - role]
        task = asyncio.create_task(waiting.swap(0))
        await asyncio.sleep(1.0)
        assert waiting.pairing.waits() == [(Key(NAME, 0), (partner.name,), DEADLINE_S)]
        assert (await task).status == "alone"
        assert now() == pytest.approx(DEADLINE_S, abs=0.2)
        assert waiting.pairing.waits() == []

    run_virtual(main())


@in_a_world()
async def test_a_partner_that_dies_in_the_middle_ends_the_wait_when_it_is_suspect(world):
    leader, follower = world.roles()
    follower.keeps = lambda message: not isinstance(message, PairCommit)
    tasks = [asyncio.create_task(peer.swap(0)) for peer in (leader, follower)]
    await asyncio.sleep(0.01)
    world.network.kill(follower.name)
    tasks[1].cancel()
    result = await tasks[0]
    assert result.status in ("alone", "failed")
    assert now() < 1.0


@in_a_world()
async def test_a_peer_that_is_not_a_member_is_alone(world):
    a, _ = world.peers.values()
    a.context.incarnation = 2  # a life that the view does not know
    assert (await a.swap(0)).status == "alone"
    assert now() == 0.0


@in_a_world()
async def test_rounds_that_the_next_view_may_own_are_not_begun_in_pairs(world):
    a, _ = world.peers.values()
    a.context.views.barrier = msgspec.structs.replace(a.context.views.newest, first_round=4)
    assert (await a.swap(5)).status == "alone"
    assert now() == 0.0
    assert a.context.touched == -1


# Broken payloads and offers.


@in_a_world()
async def test_a_corrupt_payload_fails_on_both_sides_and_is_counted(world):
    leader, follower = world.roles()
    follower.check = lambda number, shard, data: shard != 1
    results = await asyncio.gather(leader.swap(0), follower.swap(0))
    assert [result.status for result in results] == ["failed", "failed"]
    assert [result.gathered for result in results] == [None, None]
    assert follower.context.counters["corrupt payloads"] == 1
    assert now() < 2.0


@pytest.mark.parametrize(
    ("digests", "sizes"),
    [
        ((bytes(32),), (10,)),
        ((bytes(32),) * 3, (10,) * 3),
        ((bytes(32),) * 2, (10, SHARD_BYTES + 1)),
    ],
    ids=["too few shards", "too many shards", "too large a shard"],
)
def test_an_offer_that_is_not_of_this_stream_fails_and_nothing_is_fetched(digests, sizes):
    async def main():
        world = PairingWorld()
        leader, follower = world.roles()
        leader.keeps = lambda message: False
        said = []
        world.network.tap = lambda at_s, sender, to, frame: (
            said.append((sender, unpack(frame).message)) or frame
        )
        task = asyncio.create_task(follower.swap(0))
        await asyncio.sleep(0.1)
        leader.context.send(
            follower.name, PairPropose(Offer(Key(NAME, 0), world.view.hash, digests, sizes, 1.0, 0))
        )
        assert (await task).status == "failed"
        assert [type(message) for sender, message in said if sender == follower.name] == [
            PairAccept,
            PairAbort,
        ]
        assert now() < 1.0
        assert not world.failures

    run_virtual(main())


@in_a_world()
async def test_a_payload_that_comes_after_the_end_is_not_kept(world):
    leader, follower = world.roles()
    leader.keeps = lambda message: False
    world.network.set_link(leader.name, LinkModel(up_bytes_per_s=100_000))
    task = asyncio.create_task(follower.swap(0))
    await asyncio.sleep(0.1)
    offer = msgspec.structs.replace(leader.offer(0), view=world.view.hash)
    leader.context.send(follower.name, PairPropose(offer))
    await asyncio.sleep(0.5)
    leader.context.send(follower.name, PairAbort(offer.key))
    assert (await task).status == "failed"
    before_bytes = follower.links.received_bytes
    await asyncio.sleep(DEADLINE_S)
    assert follower.links.received_bytes - before_bytes > 60_000, (
        "nothing came late, so nothing was shown"
    )
    leader.store.release(work_pin(offer.key))


@in_a_world()
async def test_a_follower_that_never_hears_the_decision_is_counted_as_unsure(world):
    leader, follower = world.roles()
    follower.keeps = lambda message: not isinstance(message, PairCommit)
    results = await asyncio.gather(leader.swap(0), follower.swap(0))
    assert [result.status for result in results] == ["ok", "failed"]
    assert (leader.pairing.unsure_rounds, follower.pairing.unsure_rounds) == (0, 1)


@in_a_world()
async def test_a_lost_decision_is_asked_for_again_after_the_leader_has_gone_on(world):
    leader, follower = world.roles()
    commits = []

    def loses_the_first(message):
        commits.extend([message] * isinstance(message, PairCommit))
        return not isinstance(message, PairCommit) or len(commits) > 1

    follower.keeps = loses_the_first
    results = await asyncio.gather(leader.swap(0), follower.swap(0))
    assert [result.status for result in results] == ["ok", "ok"]
    assert len(commits) == 2
    assert any(isinstance(message, PairHave) and message.ask for message in leader.heard)


# Strayed partners.


@in_a_world()
async def test_a_proposal_that_comes_before_its_time_is_kept_and_answered_then(world):
    leader, follower = world.roles()
    task = asyncio.create_task(leader.swap(0))
    await asyncio.sleep(3.0)
    begun_s = now()
    assert (await follower.swap(0)).status == "ok"
    assert (await task).status == "ok"
    assert now() - begun_s < 1.5


@in_a_world()
async def test_a_leader_that_lags_behind_is_told_where_its_partner_is_and_skips_to_it(world):
    number = world.led_by("a", after=3)
    a, b = world.peers.values()
    b.pairing.open(b.stream, after_round=number + 19)
    result = await a.swap(number)
    assert (result.status, result.next_round) == ("alone", number + 20)
    assert now() < 0.5


@in_a_world()
async def test_a_follower_that_lags_behind_learns_from_the_proposal_and_skips_to_it(world):
    ahead = world.led_by("a", after=10)
    a, b = world.peers.values()
    task = asyncio.create_task(a.swap(ahead))
    await asyncio.sleep(0.2)
    result = await b.swap(world.led_by("a"))
    assert (result.status, result.next_round) == ("alone", ahead)
    assert now() < 0.5, "its partner has gone on, so it does not wait"
    assert (await b.swap(ahead)).status == (await task).status == "ok"


@in_a_world()
async def test_one_message_moves_a_peer_ahead_by_a_bounded_number_of_rounds(world):
    leader, follower = world.roles()
    follower.pairing.open(follower.stream, after_round=10**9 - 1)
    assert (await leader.swap(0)).next_round == MAX_JUMP


@in_a_world()
async def test_strangers_move_no_peer(world):
    a, b = world.peers.values()
    stranger = Peer(world, "s", world.view, 1)
    for message in (PairRefuse(Key(NAME, 0), 50), PairPropose(stranger.offer(50))):
        stranger.context.send("a", message)
    b.context.incarnation = 9  # a member's name in a life that the view does not know
    b.context.send("a", PairRefuse(Key(NAME, 0), 60))
    await asyncio.sleep(1.0)
    a.context.incarnation = 2
    assert (await a.swap(0)).next_round == 1
    assert any(isinstance(message, PairRefuse) for message in stranger.heard), (
        "a proposal is answered, with no"
    )


# Messages about what is over, unknown or of another view.


@in_a_world()
async def test_messages_about_a_pair_that_is_not_running_are_answered_with_its_end(world):
    b = world.peers["b"]
    accept = PairAccept(Offer(Key(NAME, 2), world.view.hash, (), (), 1.0, 0))
    for message in (accept, PairHave(Key(NAME, 3), bytes(32)), PairCommit(Key(NAME, 4))):
        b.context.send("a", message)
    await asyncio.sleep(1.0)
    assert sorted(b.heard, key=lambda message: message.key) == [
        PairAbort(Key(NAME, 2)),
        PairAbort(Key(NAME, 3)),
    ]


@in_a_world()
async def test_an_unknown_stream_is_dropped_and_an_unknown_view_counted_and_refused(world):
    a, b = world.peers.values()
    b.context.send("a", PairAbort(Key("another", 0)))
    b.context.send("a", PairPropose(Offer(Key(NAME, 0), bytes([9]) * 32, (), (), 1.0, 0)))
    await asyncio.sleep(1.0)
    assert a.context.counters == {"dropped: unknown stream": 1, "stale view": 1}
    assert b.heard == [PairRefuse(Key(NAME, 0), 0)]


@in_a_world()
async def test_a_cancelled_exchange_tells_its_partner_so_that_it_need_not_wait(world):
    leader, follower = world.roles()
    follower.keeps = lambda message: not isinstance(message, PairCommit)
    tasks = [asyncio.create_task(peer.swap(0)) for peer in (leader, follower)]
    await asyncio.sleep(0.15)
    tasks[0].cancel()
    result = await tasks[1]
    assert result.status in ("alone", "failed")
    assert now() < 1.0


@in_a_world()
async def test_a_round_that_was_begun_is_left_however_it_ends_until_the_chain_changes(world):
    leader, _ = world.roles()
    assert leader.pairing.left_round(NAME) == -1
    task = asyncio.create_task(leader.swap(3))
    await asyncio.sleep(0.15)
    task.cancel()
    await asyncio.wait([task])
    assert leader.pairing.left_round(NAME) == 3
    leader.pairing.abandon()
    assert leader.pairing.left_round(NAME) == -1


@in_a_world()
async def test_what_is_remembered_of_past_rounds_is_bounded(world):
    a, b = world.peers.values()
    for number in range(DONE_KEPT + 5):
        await asyncio.gather(a.swap(number), b.swap(number))
    for peer in (a, b):
        assert peer.pairing.remembered == DONE_KEPT
