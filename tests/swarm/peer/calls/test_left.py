"""Payloads that stay where they were made go from there to the server that needs them, within
bounds, until their caller drops them; and no lie about them does harm."""

import asyncio

import pytest
from worlds.switchboard import RTT_S, Echo, data_of, in_a_world
from worlds.waiting import now

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.chunks import STALL_S
from farflock.swarm.messages import Answer, Call, Heard, Keep, Piece, Want
from farflock.swarm.peer.calls import left as left_module
from farflock.swarm.peer.calls.call_server import CallReply
from farflock.swarm.peer.calls.calls import KEEP_S, NotFetched
from farflock.swarm.peer.calls.left import LEFT_LEASE_S, MIN_LEFT_BYTES
from farflock.swarm.peer.calls.payloads import HOLDER_TIMEOUT_S, Left
from farflock.swarm.sim.network import DEAD_S, LinkModel

LARGE = data_of(MIN_LEFT_BYTES)
TOKENS = b"tokens"


class Maker(Echo):
    """A handler that makes a large payload of each request, and notes what it is given."""

    def __init__(self, payload=LARGE):
        super().__init__(answer=CallReply(b"made", (payload,)))
        self.given = []

    async def serve(self, caller, request, payloads):
        self.given.append(payloads)
        return await super().serve(caller, request, payloads)


def trio(world, payload=LARGE):
    """Return a caller, a maker and a user, which know each other as members."""
    return [
        world.peer("caller"),
        world.peer("maker", Maker(payload)),
        world.peer("user", Maker(data_of(MIN_LEFT_BYTES, "user"))),
    ]


async def left_at(caller, server, *payloads):
    reply = await caller.ask(server, b"make", payloads, leave=True)
    assert reply.payloads == ()
    (left,) = reply.left
    return left


async def not_fetched(caller, *payloads, **options):
    with pytest.raises(NotFetched) as failure:
        await caller.ask("user", b"use", payloads, **options)
    return failure.value.places


# Without faults.


@in_a_world
async def test_a_payload_goes_from_its_maker_to_its_user_and_not_through_the_caller(world):
    caller, maker, user = trio(world)
    senders = []
    world.taps.append(lambda sender, message: isinstance(message, Piece) and senders.append(sender))
    left = await left_at(caller, "maker")
    assert (len(left), left.holders) == (len(LARGE), ("maker",))
    assert not senders
    made = await left_at(caller, "user", TOKENS, left)
    assert user.calls.handler.given == [(TOKENS, LARGE)]
    assert set(senders) == {"maker"}
    assert caller.store.size_bytes == 0
    assert (caller.left, maker.left, user.left) == ((2, 0), (0, 1), (0, 1))
    caller.calls.drop(left)
    caller.calls.drop(made)
    await world.empty(within_s=RTT_S)


@in_a_world
async def test_a_hop_with_a_payload_that_was_left_takes_two_round_trips(world):
    caller, *_ = trio(world)
    left = await left_at(caller, "maker")
    assert now() == pytest.approx(RTT_S, abs=0.01)
    made = await left_at(caller, "user", TOKENS, left)
    assert now() == pytest.approx(3 * RTT_S, abs=0.03)
    caller.calls.drop(left)
    caller.calls.drop(made)


@in_a_world
async def test_a_small_payload_comes_with_its_answer_all_the_same(world):
    caller, maker, _ = trio(world, LARGE[:-1])
    reply = await caller.ask("maker", b"make", leave=True)
    assert (reply.payloads, reply.left) == ((LARGE[:-1],), ())
    assert maker.left == (0, 0)


@pytest.mark.parametrize("bound", ["MAX_LEFT_BYTES", "MAX_LEFT_BYTES_EACH", "MAX_LEFT_EACH"])
def test_beyond_its_bounds_a_server_answers_with_the_payload(bound, monkeypatch):
    most = 1 if bound == "MAX_LEFT_EACH" else 2 * len(LARGE) - 1
    monkeypatch.setattr(left_module, bound, most)

    async def main(world):
        caller, maker, _ = trio(world)
        left = await left_at(caller, "maker")
        reply = await caller.ask("maker", b"again", leave=True)
        assert (reply.payloads, reply.left) == ((LARGE,), ())
        other = await world.peer("other").ask("maker", leave=True)
        assert bool(other.left) is (bound != "MAX_LEFT_BYTES")
        caller.calls.drop(left)
        world.lives[-1].kill()
        await asyncio.sleep(DEAD_S + 2.0)
        assert maker.calls.serving.left.held_bytes == 0
        caller.calls.drop(await left_at(caller, "maker"))

    in_a_world(main)()


@in_a_world
async def test_a_payload_stays_as_long_as_its_caller_wants_it(world):
    caller, maker, user = trio(world)
    left = await left_at(caller, "maker")
    await asyncio.sleep(3 * LEFT_LEASE_S)
    assert world.sent[Keep] == pytest.approx(3 * LEFT_LEASE_S / KEEP_S, abs=1)
    assert await caller.calls.fetch(left, 5.0) == LARGE
    world.lose(Keep, 10**6)
    await asyncio.sleep(LEFT_LEASE_S + 2.0)
    assert maker.left == (0, 0)
    assert maker.store.size_bytes == 0
    assert await not_fetched(caller, TOKENS, left) == b"\1"
    assert not user.calls.handler.served
    caller.calls.drop(left)


@in_a_world
async def test_of_a_caller_that_is_gone_nothing_stays(world):
    caller, maker, _ = trio(world)
    await left_at(caller, "maker")
    caller.kill()
    await asyncio.sleep(DEAD_S + 2.0)
    assert maker.left == (0, 0)


@in_a_world
async def test_a_lost_answer_costs_time_only_and_the_payload_is_made_once(world):
    caller, maker, _ = trio(world)
    world.lose(Answer, 2)
    left = await left_at(caller, "maker")
    assert set(maker.calls.handler.served.values()) == {1}
    world.lose(Heard)
    caller.calls.drop(left)
    await asyncio.sleep(LEFT_LEASE_S + 2.0)
    assert maker.left == (0, 0)
    world.say(caller, maker, Call(left.number, b"make"))
    await asyncio.sleep(1.0)
    assert maker.calls.handler.served == {("caller", b"make"): 1}


@in_a_world
async def test_a_peer_asks_itself_with_what_was_left_elsewhere_and_leaves_nothing_with_itself(
    world,
):
    caller, *_ = trio(world)
    caller.calls.handler = Maker(b"mine")
    left = await left_at(caller, "maker")
    reply = await caller.ask("caller", b"use", (TOKENS, left), leave=True)
    assert (reply.payloads, reply.left) == ((b"mine",), ())
    assert caller.calls.handler.given == [(TOKENS, LARGE)]
    caller.calls.drop(left)


def test_beside_the_maker_the_last_holders_are_named():
    left = Left((), ("maker",), 7)
    for peer in ("a", "b", "maker", "c", "b"):
        left = left.held_by(peer)
    assert left.holders == ("maker", "c", "b")
    assert left.call == ("maker", 7)


# Deaths.


@in_a_world
async def test_what_a_user_has_fetched_outlives_the_maker(world):
    caller, maker, _ = trio(world)
    third = world.peer("third", Maker())
    left = await left_at(caller, "maker")
    made = await left_at(caller, "user", TOKENS, left)
    maker.kill()
    await asyncio.sleep(2.0)
    reply = await caller.ask("third", b"use", (TOKENS, left.held_by("user")))
    assert reply.body == b"made"
    assert third.calls.handler.given == [(TOKENS, LARGE)]
    caller.calls.drop(made)
    caller.calls.drop(left)


@pytest.mark.parametrize("gone_s", [0.5, DEAD_S + 0.5], ids=["suspect", "dead"])
def test_without_its_maker_a_payload_is_missing_soon_and_the_server_is_not_to_blame(gone_s):
    async def main(world):
        caller, maker, user = trio(world)
        left = await left_at(caller, "maker")
        maker.kill()
        await asyncio.sleep(gone_s)
        begun_s = now()
        assert await not_fetched(caller, TOKENS, left) == b"\1"
        assert now() - begun_s < HOLDER_TIMEOUT_S + 2 * RTT_S
        assert await caller.calls.fetch(left, 60.0) is None
        assert now() - begun_s < 2 * HOLDER_TIMEOUT_S + 2 * RTT_S
        assert not user.calls.handler.served
        caller.calls.drop(left)

    in_a_world(main)()


@in_a_world
async def test_another_life_of_the_maker_has_nothing(world):
    caller, maker, _ = trio(world)
    left = await left_at(caller, "maker")
    maker.kill()
    await asyncio.sleep(0.5)
    world.peer("maker", Maker())
    await asyncio.sleep(0.5)
    assert await not_fetched(caller, TOKENS, left) == b"\1"
    caller.calls.drop(left)


@in_a_world
async def test_an_older_build_that_asks_the_caller_counts_as_one_that_cannot_fetch(world):
    caller, _, user = trio(world)
    left = await left_at(caller, "maker")

    def older(sender, message):
        if isinstance(message, Call) and message.holders:
            world.say(user, caller, Answer(caller.context.incarnation, message.id, "late"))
            return True
        return False

    world.taps.append(older)
    assert await not_fetched(caller, TOKENS, left) == b""
    assert (await caller.ask("user", b"use", (TOKENS, LARGE))).body == b"made"
    caller.calls.drop(left)


# Liars.


@pytest.mark.parametrize("gone", ["caller", "maker"])
def test_a_server_fetches_only_from_members_and_only_for_them(gone):
    async def main(world):
        caller, _, user = trio(world)
        left = await left_at(caller, "maker")
        world.expel(gone)
        assert await not_fetched(caller, TOKENS, left) == b"\1"
        assert now() < 3 * RTT_S
        assert world.sent[Want] == 0
        assert user.calls.handler.judged == {("caller", b"use"): 1}
        caller.calls.drop(left)

    in_a_world(main)()


@pytest.mark.parametrize(
    "chunks",
    [
        ((bytes(32), len(LARGE)),),
        ((digest_of(LARGE), len(LARGE) - 1),),
        ((digest_of(LARGE), len(LARGE) + 1),),
    ],
    ids=["does not exist", "is longer", "is shorter"],
)
def test_a_payload_that_is_not_what_the_call_says_is_missing(chunks):
    async def main(world):
        caller, _, user = trio(world)
        left = await left_at(caller, "maker")
        lie = Left(chunks, ("maker",), left.number)
        assert await not_fetched(caller, TOKENS, lie) == b"\1"
        assert now() < HOLDER_TIMEOUT_S + 4 * RTT_S
        assert not user.calls.handler.served
        caller.calls.drop(left)

    in_a_world(main)()


@in_a_world
async def test_a_maker_that_delivers_other_bytes_is_not_believed(world):
    caller, maker, user = trio(world)
    maker.store.put(LARGE[::-1], "lie", verified=digest_of(LARGE))
    left = await left_at(caller, "maker")
    assert await not_fetched(caller, TOKENS, left) == b"\1"
    assert user.context.chunks.dropped["content differs from its digest"] == 1
    assert not user.calls.handler.served
    caller.calls.drop(left)
    maker.store.release("lie")


@in_a_world
async def test_a_maker_that_never_delivers_is_waited_for_only_so_long(world):
    caller, _, user = trio(world)
    left = await left_at(caller, "maker")
    world.taps.append(lambda sender, message: isinstance(message, Piece) and sender == "maker")
    begun_s = now()
    assert await not_fetched(caller, TOKENS, left) == b"\1"
    assert HOLDER_TIMEOUT_S <= now() - begun_s < HOLDER_TIMEOUT_S + STALL_S
    assert not user.calls.handler.served
    caller.calls.drop(left)


@in_a_world
async def test_a_maker_that_delivers_slowly_is_waited_for(world):
    world.network.set_link("maker", LinkModel(up_bytes_per_s=1e5))
    caller, _, user = trio(world, data_of(10 * int(1e5)))
    left = await left_at(caller, "maker")
    reply = await caller.ask("user", b"use", (TOKENS, left), timeout_s=60.0)
    assert reply.body == b"made"
    assert now() > 2 * HOLDER_TIMEOUT_S
    assert len(user.calls.handler.given) == 1
    caller.calls.drop(left)


@in_a_world
async def test_a_refusal_comes_before_anything_is_fetched_from_a_holder(world):
    caller, _, user = trio(world)
    left = await left_at(caller, "maker")
    user.calls.handler.refuse = b"no"
    assert (await caller.ask("user", b"use", (TOKENS, left))).body == b"no"
    assert world.sent[Want] == 0
    caller.calls.drop(left)


@in_a_world
async def test_a_server_that_leaves_what_was_not_to_stay_delivers_it(world):
    caller, maker, _ = trio(world)

    def leave(sender, message):
        if isinstance(message, Call) and not message.leave and message.request == b"make":
            maker.calls.receive(
                "caller", caller.context.incarnation, Call(message.id, b"make", leave=True)
            )
            return True
        return False

    world.taps.append(leave)
    reply = await caller.ask("maker", b"make")
    assert (reply.payloads, reply.left) == ((LARGE,), ())


@in_a_world
async def test_no_peer_keeps_or_drops_what_another_one_left(world):
    caller, maker, user = trio(world)
    left = await left_at(caller, "maker")
    world.say(user, maker, Heard(left.number))
    world.say(user, maker, Keep((left.number, 77)))
    await asyncio.sleep(1.0)
    assert await caller.calls.fetch(left, 5.0) == LARGE
    world.taps.append(lambda sender, message: isinstance(message, Keep) and sender == "caller")
    for _ in range(8):
        world.say(user, maker, Keep((left.number,)))
        await asyncio.sleep(LEFT_LEASE_S / 8 + 0.5)
    assert maker.left == (0, 0)
    caller.calls.drop(left)
