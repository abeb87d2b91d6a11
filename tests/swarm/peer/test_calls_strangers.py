"""A peer that lies about calls ends no call of another peer, and one that asks for too much has to
wait, so that memory stays bounded."""

import asyncio

import pytest
from worlds.switchboard import RTT_S, Echo, backwards, data_of, in_a_world
from worlds.waiting import now

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES, Answer, Call, Heard
from farflock.swarm.peer import call_server as server_module
from farflock.swarm.peer.call_server import (
    FETCH_S,
    FORGET_S,
    MAX_CALLS,
    MAX_CALLS_EACH,
    MAX_LIVES,
    MAX_OVER,
)
from farflock.swarm.peer.calls import RESEND_S, CallFailed

# Strangers and liars.


@in_a_world
async def test_an_answer_counts_only_from_the_peer_asked_and_for_the_call_and_life_that_asked(
    world,
):
    caller, server = world.pair(Echo(slow_s=2.0))
    liar = world.peer("liar")
    asking = asyncio.create_task(caller.ask("server", b"do"))
    await asyncio.sleep(RTT_S)
    mine = caller.context.incarnation
    world.say(liar, caller, Answer(mine, 0, "ok", b"lie"))
    world.say(liar, caller, Answer(mine, 0, "failed"))
    world.say(liar, caller, Heard(0))
    world.say(server, caller, Answer(mine, 1, "ok", b"lie"))
    world.say(server, caller, Answer(mine - 1, 0, "ok", b"lie"))
    assert (await asking).body == b"do"
    assert caller.context.counters["dropped: answer to no call"] == 4


@in_a_world
async def test_no_peer_ends_the_call_of_another_peer_or_of_another_life(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    liar = world.peer("liar")
    asking = asyncio.create_task(caller.ask("server", b"do"))
    await asyncio.sleep(RTT_S)
    world.say(liar, server, Heard(0))
    server.calls.receive("caller", caller.context.incarnation + 1, Heard(0))
    assert (await asking).body == b"do"


@pytest.mark.parametrize(
    "payloads",
    [
        (((digest_of(b"held"), 5),),),
        (((digest_of(b"held"), 4),), ((digest_of(b"held"), 3),)),
        (((bytes(32), 4),),),
    ],
    ids=["another size", "two sizes", "does not exist"],
)
def test_payloads_that_are_not_what_the_call_says_are_never_served(payloads):
    async def main(world):
        liar, server = world.pair()
        for life in (liar, server):
            life.store.put(b"held", "mine")
        world.say(liar, server, Call(0, b"do", payloads))
        await asyncio.sleep(2.0)
        assert server.calls.handler.judged == {("caller", b"do"): 1}
        assert not server.calls.handler.served
        answer = server.calls.serving.answer("caller", liar.context.incarnation, 0)
        assert answer.verdict == "late"
        for life in (liar, server):
            life.store.release("mine")

    in_a_world(main)()


@pytest.mark.parametrize("inline", [(b"bent",), (b"held!",), (b"", b"other", b"bent")])
def test_bytes_inside_a_call_that_it_does_not_announce_are_dropped(inline):
    async def main(world):
        liar, server = world.pair()
        announced = ((digest_of(b"held"), 4),)
        world.say(liar, server, Call(0, b"do", (announced,), inline))
        await asyncio.sleep(2.0)
        assert not server.calls.handler.served
        assert server.store.size_bytes == 0
        dropped = server.context.counters["dropped: payload that its call does not announce"]
        assert dropped == len(inline)

    in_a_world(main)()


@in_a_world
async def test_bytes_inside_an_answer_that_it_does_not_announce_are_fetched_from_its_server(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    server.store.put(b"held", "mine")
    asking = asyncio.create_task(caller.ask("server"))
    await asyncio.sleep(RTT_S)
    announced = (((digest_of(b"held"), 4),),)
    life = caller.context.incarnation
    world.say(server, caller, Answer(life, 0, "ok", b"", announced, (b"bent",)))
    assert (await asking).payloads == (b"held",)
    assert caller.context.counters["dropped: payload that its call does not announce"] == 1
    server.store.release("mine")


@in_a_world
async def test_payloads_that_never_come_are_waited_for_only_so_long(world):
    """The caller holds the chunk, and answers no request for it."""
    liar, server = world.pair()
    digest = liar.store.put(bytes(MAX_CHUNK_BYTES), "mine")
    liar.context.chunks.server.receive = lambda sender, want: None
    world.say(liar, server, Call(0, b"do", (((digest, MAX_CHUNK_BYTES),),)))
    await asyncio.sleep(FETCH_S - 1.0)
    assert server.kept[:3] == (0, 1, MAX_CHUNK_BYTES)
    await asyncio.sleep(1.5)
    assert server.kept[:3] == (0, 1, 0)
    assert not server.calls.handler.served
    liar.store.release("mine")


@pytest.mark.parametrize(
    ("payloads", "reason"),
    [
        ((((bytes(32), 4),),), "rpc"),
        ((((digest_of(b"held"), 5),),), "rpc"),
        ((((digest_of(b"other"), 9),),), "rpc"),
    ],
    ids=["does not exist", "another size than here", "another size than there"],
)
def test_an_answer_whose_payloads_are_not_what_it_says_fails_the_call(payloads, reason):
    async def main(world):
        caller, liar = world.pair(Echo(slow_s=2.0))
        caller.store.put(b"held", "mine")
        liar.store.put(b"other", "mine")
        asking = asyncio.create_task(caller.fails("server", timeout_s=10.0))
        await asyncio.sleep(0.5)
        world.say(liar, caller, Answer(caller.context.incarnation, 0, "ok", b"", payloads))
        assert await asking == reason
        for life in (caller, liar):
            life.store.release("mine")

    in_a_world(main)()


# Bounds.


@in_a_world
async def test_a_caller_that_asks_too_much_at_once_is_served_when_there_is_room(world):
    caller, server = world.pair(Echo(slow_s=3.0))
    requests = [b"%d" % number for number in range(MAX_CALLS_EACH + 10)]
    replies = asyncio.gather(*(caller.ask("server", request) for request in requests))
    await asyncio.sleep(2.0)
    assert len(server.calls.handler.served) == MAX_CALLS_EACH
    assert (await world.peer("other").ask("server", b"do")).body == b"do", (
        "one caller fills it for all others"
    )
    assert [reply.body for reply in await replies] == requests
    assert now() < 3.0 + 3.0 + 2 * RESEND_S
    assert set(server.calls.handler.served.values()) == {1}
    assert caller.context.counters["calls to a full peer"] >= 10


@in_a_world
async def test_all_callers_together_get_no_more_than_the_server_has_room_for(world):
    server = world.peer("server", Echo(slow_s=3.0))
    callers = [world.peer(f"caller {number}") for number in range(6)]
    asking = asyncio.gather(
        *(caller.ask("server", b"%d" % number) for caller in callers for number in range(60))
    )
    await asyncio.sleep(2.0)
    assert len(server.calls.handler.served) == MAX_CALLS
    assert await callers[0].fails("server", timeout_s=0.5) == "deadline"
    assert len(await asking) == 360
    assert set(server.calls.handler.served.values()) == {1}


@in_a_world
async def test_payloads_on_both_sides_wait_for_room(world):
    caller = world.peer("caller", room_bytes=5000)
    server = world.peer("server", Echo(slow_s=1.0), room_bytes=2500)
    most = [0, 0]

    def look(sender, message):
        most[0] = max(most[0], caller.store.size_bytes)
        most[1] = max(most[1], server.calls.serving.held_bytes)

    world.taps.append(look)
    payloads = [(data_of(1000, number),) for number in range(12)]
    replies = await asyncio.gather(*(caller.ask("server", b"do", mine) for mine in payloads))
    assert [reply.payloads for reply in replies] == [backwards(*mine) for mine in payloads]
    assert most == [5000, 2000]
    held = [
        asyncio.create_task(caller.ask("server", b"", (data_of(5000),), timeout_s=5.0))
        for _ in range(1)
    ]
    assert await caller.fails("server", b"do", (data_of(1000),), timeout_s=0.1) == "deadline"
    assert isinstance((await asyncio.gather(*held, return_exceptions=True))[0], CallFailed)


@in_a_world
async def test_of_calls_that_are_over_only_so_many_are_remembered_and_older_ones_are_refused(world):
    _, server = world.pair()
    for number in range(MAX_OVER + 10):
        server.calls.receive("caller", 1, Heard(number))
    assert server.calls.serving.remembered("caller", 1) == MAX_OVER
    for number in (0, 9, 10, MAX_OVER + 9):
        server.calls.receive("caller", 1, Call(number, b"late"))
    await asyncio.sleep(1.0)
    assert not server.calls.handler.judged
    server.calls.receive("caller", 1, Call(MAX_OVER + 10, b"new"))
    await asyncio.sleep(1.0)
    assert server.calls.handler.judged == {("caller", b"new"): 1}


@in_a_world
async def test_callers_and_lives_are_remembered_in_bounded_number_and_for_bounded_time(world):
    _, server = world.pair()
    serving = server.calls.serving
    for life in range(MAX_LIVES + 3):
        await asyncio.sleep(0.01)
        server.calls.receive("caller", life, Heard(0))
    assert list(serving.callers) == [("caller", life) for life in range(3, MAX_LIVES + 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "MAX_CALLERS", MAX_LIVES)
        other = world.peer("other")
        assert await other.fails("server", timeout_s=1.0) == "deadline"
        assert other.context.counters["calls to a full peer"] > 0
    assert not server.calls.handler.judged
    assert len(serving.callers) == MAX_LIVES
    await asyncio.sleep(FORGET_S + 1.0)
    assert not serving.callers
    assert (await other.ask("server", b"do")).body == b"do"
