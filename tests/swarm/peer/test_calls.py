"""A call is served at most once and answered, or fails in time with a reason; and whatever happens,
nothing is kept for it."""

import asyncio
import contextlib

import pytest
from worlds.peers import identity, peer_in
from worlds.switchboard import LINK, RTT_S, STALE_S, Echo, backwards, data_of, in_a_world
from worlds.waiting import now

from farflock.swarm.chunk_server import PIECE_BYTES
from farflock.swarm.frame import Frame, pack
from farflock.swarm.messages import (
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_INLINE_BYTES,
    MAX_PAYLOADS,
    Answer,
    Call,
    Heard,
    Piece,
    Want,
)
from farflock.swarm.peer import call_server as server_module
from farflock.swarm.peer import payloads as payloads_module
from farflock.swarm.peer.call_server import LEASE_S, CallReply
from farflock.swarm.peer.payloads import MAX_PAYLOAD_BYTES
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import DEAD_S, Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

LARGE = data_of(5 * PIECE_BYTES)  # one request asks for whole pieces

# Without faults.


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (70_000, 0, 70_000),
        (MAX_CHUNK_BYTES,),
        (2 * MAX_CHUNK_BYTES + 1, 5),
        (9,) * MAX_PAYLOADS,
    ],
    ids=str,
)
def test_a_call_brings_back_what_its_handler_returns(sizes):
    async def main(world):
        caller, server = world.pair()
        payloads = tuple(data_of(size, place) for place, size in enumerate(sizes))
        assert await caller.ask("server", b"do", payloads) == CallReply(b"do", backwards(*payloads))
        assert server.calls.handler.served == {("caller", b"do"): 1}
        await world.empty(within_s=RTT_S + 0.1)

    in_a_world(main)()


@pytest.mark.parametrize(
    ("handler", "payloads", "round_trips"),
    [
        (Echo(), (), 1),
        (Echo(refuse=b"busy"), (b"much",), 1),
        (Echo(answer=CallReply(b"done")), (b"small",), 1),
        (Echo(answer=CallReply(b"", (b"small",))), (), 1),
        (Echo(), (b"small", b"other"), 1),
        (Echo(answer=CallReply(b"done")), (LARGE,), 2),
        (Echo(answer=CallReply(b"", (LARGE,))), (), 2),
        (Echo(), (b"small", LARGE), 3),
    ],
    ids=[
        "no payload",
        "refused",
        "small there",
        "small back",
        "small both ways",
        "large there",
        "large back",
        "large both ways",
    ],
)
def test_a_call_takes_a_round_trip_and_one_more_for_large_payloads_of_each_way(
    handler, payloads, round_trips
):
    async def main(world):
        caller, _ = world.pair(handler)
        await caller.ask("server", b"do", payloads)
        wire_s = 0.02 if LARGE in payloads or handler.answer else 0.001
        assert now() == pytest.approx(round_trips * RTT_S, abs=wire_s)
        await asyncio.sleep(RTT_S)
        assert (world.sent[Call], world.sent[Answer], world.sent[Heard]) == (1, 1, 1)

    in_a_world(main)()


@in_a_world
async def test_a_refusal_comes_before_any_payload_travels(world):
    caller, server = world.pair(Echo(refuse=b"busy"))
    assert await caller.ask("server", b"do", (data_of(1_000_000),)) == CallReply(b"busy")
    assert not server.calls.handler.served
    assert world.sent[Want] == world.sent[Piece] == 0


@in_a_world
async def test_many_calls_at_once_get_each_their_own_answer(world):
    caller, server = world.pair(Echo(slow_s=1.0))
    requests = [b"%d" % number for number in range(50)]
    replies = await asyncio.gather(
        *(caller.ask("server", request, (request * 100,)) for request in requests)
    )
    assert replies == [CallReply(request, backwards(request * 100)) for request in requests]
    assert set(server.calls.handler.served.values()) == {1}


@in_a_world
async def test_the_same_payload_twice_travels_once(world):
    caller, _ = world.pair(Echo(answer=CallReply(b"done")))
    calls = []
    world.taps.append(lambda sender, message: isinstance(message, Call) and calls.append(message))
    await caller.ask("server", b"do", (b"x" * 1000,) * 4)
    assert [call.inline for call in calls] == [(b"x" * 1000,)]
    assert world.sent[Piece] == 0
    await caller.ask("server", b"do", (LARGE,) * 4)
    assert world.sent[Piece] == -(-len(LARGE) // PIECE_BYTES)


# Small payloads inside the message.


@pytest.mark.parametrize(
    ("sizes", "travel"),
    [
        ((MAX_INLINE_BYTES,), True),
        ((MAX_INLINE_BYTES + 1,), False),
        ((MAX_INLINE_BYTES // 2, MAX_INLINE_BYTES // 2), True),
        ((MAX_INLINE_BYTES // 2, MAX_INLINE_BYTES // 2, 1), False),
        ((0, 0), True),
    ],
)
def test_payloads_travel_inside_the_message_as_long_as_they_are_small_together(sizes, travel):
    async def main(world):
        caller, _ = world.pair()
        payloads = tuple(data_of(size, place) for place, size in enumerate(sizes))
        assert await caller.ask("server", b"do", payloads) == CallReply(b"do", backwards(*payloads))
        assert (world.sent[Want] == world.sent[Piece] == 0) is travel
        await world.empty(within_s=RTT_S + 0.1)

    in_a_world(main)()


@in_a_world
async def test_repeats_are_small_and_small_payloads_are_kept_once(world):
    caller, server = world.pair(Echo(slow_s=3.0))
    calls = []
    world.taps.append(lambda sender, message: isinstance(message, Call) and calls.append(message))
    asking = asyncio.create_task(caller.ask("server", b"do", (data_of(1000),)))
    await asyncio.sleep(2.5)
    server.calls.receive("caller", caller.context.incarnation, calls[0])  # a copy, payload and all
    assert server.kept[:4] == (0, 1, 1000, 0), "the handler has the only one"
    await asking
    assert len(calls) > 3
    assert [len(call.inline) for call in calls] == [1] + [0] * (len(calls) - 1)


@in_a_world
async def test_a_full_server_drops_small_payloads_too_and_gets_them_when_it_has_room(world):
    caller, server = world.pair(Echo(slow_s=2.0), room_bytes=1500)
    asked = [caller.ask("server", b"%d" % n, (data_of(1000, n),)) for n in range(2)]
    asking = asyncio.gather(*asked)
    await asyncio.sleep(1.0)
    assert server.kept[:3] == (0, 1, 1000)
    assert caller.context.counters["calls to a full peer"] > 0
    assert [reply.body for reply in await asking] == [b"0", b"1"]


@in_a_world
async def test_a_payload_that_a_server_has_had_is_not_sent_again_but_fetched_if_it_is_gone(
    world,
):
    caller, server = world.pair(Echo(answer=CallReply(b"done")))
    server.store.budget_bytes = 10_000  # keeps what no call needs any more, as peers do
    calls = []
    world.taps.append(lambda sender, message: isinstance(message, Call) and calls.append(message))
    first, second = data_of(1000, 1), data_of(1000, 2)
    await caller.ask("server", b"1", (first,))
    await caller.ask("server", b"2", (first, second))
    assert [call.inline for call in calls] == [(first,), (second,)]
    assert world.sent[Want] == 0
    server.store.budget_bytes = 0
    await world.peer("other").ask("server", b"3", (data_of(9),))  # makes the server tidy up
    await caller.ask("server", b"4", (first, second))
    assert world.sent[Want] == 2
    assert set(server.calls.handler.served.values()) == {1}
    await world.empty()


def test_few_chunks_are_remembered_as_delivered(monkeypatch):
    monkeypatch.setattr(payloads_module, "MAX_DELIVERED", 3)
    delivered = payloads_module.Delivered()
    for number in range(9):
        delivered.add("server", [((b"%d" % number, 1), (b"same", 1))])
    assert len(delivered) == 3
    assert [delivered.had("server", name) for name in (b"same", b"8", b"7", b"6")] == [
        True,
        True,
        True,
        False,
    ]
    assert not delivered.had("other", b"8")


@in_a_world
async def test_a_refusal_keeps_nothing_of_a_small_payload(world):
    caller, server = world.pair(Echo(refuse=b"busy"))
    world.lose(Heard, times=1)
    assert await caller.ask("server", b"do", (data_of(1000),)) == CallReply(b"busy")
    assert server.kept == (0, 1, 0, 0, 0)
    assert not server.calls.handler.served


@in_a_world
async def test_on_a_slow_line_no_repeat_has_the_payloads_sent_again(world):
    for name in ("caller", "server"):
        world.network.set_link(name, LinkModel(up_bytes_per_s=125_000, latency_s=RTT_S / 4))
    caller, server = world.pair()
    payload = data_of(MAX_INLINE_BYTES)
    assert (await caller.ask("server", b"do", (payload,))).payloads == backwards(payload)
    assert now() > 2 * MAX_INLINE_BYTES / 125_000
    assert world.sent[Want] == world.sent[Piece] == 0
    assert set(server.calls.handler.served.values()) == {1}


# Calls that cannot be made.


@pytest.mark.parametrize(
    ("handler", "request_bytes"),
    [
        (None, b"do"),
        (Echo(), b"bad"),
        (Echo(), b"worse"),
        (Echo(answer=CallReply(bytes(MAX_BODY_BYTES + 1))), b"do"),
        (Echo(answer=CallReply(b"", (b"",) * (MAX_PAYLOADS + 1))), b"do"),
        (Echo(refuse=bytes(MAX_BODY_BYTES + 1)), b"do"),
    ],
    ids=[
        "no handler",
        "admit raises",
        "serve raises",
        "body too long",
        "too many payloads",
        "refusal too long",
    ],
)
@pytest.mark.parametrize("callee", ["server", "caller"])
def test_a_call_that_its_server_cannot_do_fails_at_once_and_harms_nothing_else(
    handler, request_bytes, callee
):
    async def main(world):
        caller, server = world.pair()
        caller.calls.handler = server.calls.handler = handler
        assert await caller.fails(callee, request_bytes, (b"payload",)) == "rpc"
        assert now() < 4 * RTT_S
        caller.calls.handler = server.calls.handler = Echo()
        assert (await caller.ask(callee)).body == b"do"

    in_a_world(main)()


@in_a_world
async def test_what_a_handler_raises_is_logged(world):
    caller, _ = world.pair()
    records = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            server_module.log, "exception", lambda text, *args: records.append(text % args)
        )
        assert (
            await caller.fails("server", b"bad") == await caller.fails("server", b"worse") == "rpc"
        )
    assert records == [
        "the handler failed to admit or refuse a call from caller",
        "the handler failed to serve a call from caller",
    ]


@pytest.mark.parametrize("callee", ["server", "caller"])
def test_an_answer_with_more_payload_than_agreed_fails_unfetched(callee):
    async def main(world):
        caller, server = world.pair(Echo(answer=CallReply(b"", (data_of(600), data_of(500)))))
        caller.calls.handler = server.calls.handler
        assert await caller.fails(callee, max_reply_bytes=1099) == "rpc"
        assert world.sent[Want] == 0
        assert (await caller.ask(callee, max_reply_bytes=1100)).payloads == (
            data_of(600),
            data_of(500),
        )

    in_a_world(main)()


@in_a_world
async def test_more_than_a_call_can_carry_is_not_sent(world):
    caller, _ = world.pair()
    small = world.peer("small", room_bytes=1000)
    for request, payloads in [
        (bytes(MAX_BODY_BYTES + 1), ()),
        (b"", (b"",) * (MAX_PAYLOADS + 1)),
        (b"", (bytes(MAX_PAYLOAD_BYTES + 1),)),
    ]:
        with pytest.raises(ValueError, match="at most"):
            await caller.ask("server", request, payloads)
    with pytest.raises(
        ValueError, match="1001 bytes; this peer sends at most 1000, so send a smaller batch"
    ):
        await small.ask("server", b"", (bytes(1001),))
    assert not world.sent
    assert await caller.fails("small", b"", (bytes(1001),)) == "rpc", (
        "it would be asked again for ever"
    )


@in_a_world
async def test_a_handler_that_never_ends_is_ended(world):
    caller, server = world.pair(Echo(slow_s=10_000))
    assert await caller.fails("server", timeout_s=1000.0) == "rpc"
    assert now() == pytest.approx(server_module.SERVE_S + RTT_S, abs=1.0)
    assert not server.calls.handler.ended


# Deadlines, deaths and cancelled callers.


@in_a_world
async def test_a_call_fails_at_its_deadline_and_the_handler_goes_on_alone(world):
    caller, server = world.pair(Echo(slow_s=20.0))
    assert await caller.fails("server", b"do", (data_of(1000),), timeout_s=5.0) == "deadline"
    assert now() == pytest.approx(5.0)
    assert not any(caller.kept)
    await asyncio.sleep(10.0)
    assert server.kept == (0, 1, 1000, 0, 0)
    await world.empty(within_s=6.0)
    assert server.calls.handler.ended
    assert world.sent[Answer] == 0


@in_a_world
async def test_a_call_to_an_unknown_peer_fails_at_the_deadline_and_to_a_dead_one_at_once(world):
    caller, server = world.pair()
    assert await caller.fails("nobody", timeout_s=2.0) == "deadline"
    server.kill()
    await asyncio.sleep(DEAD_S + 0.1)
    begun_s = now()
    assert await caller.fails("server", b"do", (b"payload",)) == "dial"
    assert now() == begun_s
    assert not any(caller.kept)


@pytest.mark.parametrize(
    "killed_s",
    [0.5, 1.5, 2.5, 4.5],
    ids=["call under way", "payload under way", "serving", "answer under way"],
)
def test_a_server_that_dies_is_noticed_whatever_it_was_doing(killed_s):
    async def main(world):
        caller, server = world.pair(Echo(slow_s=1.0))
        if killed_s < 1:
            world.lose(Call, 10)
        else:
            for peer in ("caller", "server"):  # what has left a peer arrives, though it has died
                world.network.set_link(
                    peer, LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6)
                )
        asking = asyncio.create_task(
            caller.fails("server", b"do", (data_of(900_000),), timeout_s=60.0)
        )
        await asyncio.sleep(killed_s)
        assert not asking.done()
        phases = {0.5: (0, 0), 1.5: (0, 0), 2.5: (1, 0), 4.5: (1, 1)}
        echo = server.calls.handler
        assert (len(echo.served), len(echo.ended)) == phases[killed_s]
        server.kill()
        assert await asking == "dial"
        assert killed_s + DEAD_S <= now() < killed_s + DEAD_S + 1.0

    in_a_world(main)()


@pytest.mark.parametrize(
    "cancelled_s",
    [0.01, 1.5, 2.5, 4.5],
    ids=["call under way", "payload under way", "serving", "answer under way"],
)
@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_of_a_caller_that_goes_nothing_is_kept_and_a_handler_is_not_disturbed(cancelled_s, how):
    async def main(world):
        world.network.set_link("caller", LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6))
        caller, server = world.pair(Echo(slow_s=1.0))
        asking = asyncio.create_task(
            caller.ask("server", b"do", (data_of(900_000),), timeout_s=60.0)
        )
        await asyncio.sleep(cancelled_s)
        assert not asking.done()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if how == "killed":
                caller.kill()
            await asking
        assert not any(caller.kept)
        echo = server.calls.handler
        began = len(echo.served)
        await world.empty(within_s=(DEAD_S if how == "killed" else 1.1) + 0.5)
        assert len(echo.served) == len(echo.ended) == began == (cancelled_s > 2)

    in_a_world(main)()


@in_a_world
async def test_payloads_of_a_call_that_was_given_up_are_fetched_no_further_though_they_could_be(
    world,
):
    world.network.set_link("caller", LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6))
    caller, server = world.pair()
    payload = data_of(2_000_000)
    caller.store.put(payload, "mine")
    asking = asyncio.create_task(caller.ask("server", b"do", (payload,)))
    await asyncio.sleep(1.0)
    assert server.kept[:3] == (0, 1, len(payload))
    asking.cancel()
    await asyncio.sleep(RTT_S)
    assert not any(server.kept)
    await asyncio.sleep(5.0)
    assert not server.calls.handler.served
    caller.store.release("mine")


@in_a_world
async def test_a_call_that_is_given_up_as_it_comes_is_not_even_judged(world):
    _, server = world.pair()
    for message in (Call(0, b"do"), Heard(0)):
        server.calls.receive("caller", 1, message)
    await asyncio.sleep(1.0)
    assert not server.calls.handler.judged


@in_a_world
async def test_while_answers_fill_the_room_nothing_new_begins(world):
    caller, server = world.pair(Echo(answer=CallReply(b"", (data_of(3000),))), room_bytes=3000)
    world.lose(Heard)
    await caller.ask("server")
    assert await caller.fails("server", b"do", (b"payload",), timeout_s=LEASE_S / 2) == "deadline"
    assert (await caller.ask("server", b"do", (b"payload",))).payloads == (data_of(3000),)
    assert now() > LEASE_S
    assert set(server.calls.handler.served.values()) == {2}


@in_a_world
async def test_a_pause_of_either_side_is_waited_for(world):
    world.network.set_link("caller", LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6))
    caller, server = world.pair(Echo(slow_s=1.0))
    asking = asyncio.create_task(caller.ask("server", b"do", (data_of(900_000),), timeout_s=60.0))
    for pause_at_s in (1.0, 6.0):
        await asyncio.sleep(pause_at_s - now())
        world.network.stop("server")
        await asyncio.sleep(STALE_S)
        assert caller.context.life("server") == "suspect"
        world.network.cont("server")
    assert await asking == CallReply(b"do", backwards(data_of(900_000)))
    assert now() > 6.0 + STALE_S
    assert set(server.calls.handler.served.values()) == {1}


# Calls to oneself, and calls in a whole peer.


@in_a_world
async def test_a_call_to_myself_goes_to_my_handler_and_over_no_link(world):
    echo = Echo(slow_s=1.0)
    me = world.peer("me", echo)
    payload = data_of(1000)
    assert (await me.ask("me", b"do", (payload,))).payloads == backwards(payload)
    echo.refuse = b"busy"
    assert await me.ask("me", b"do", (payload,)) == CallReply(b"busy")
    assert echo.served == {("me", b"do"): 1}
    assert not world.sent


@in_a_world
async def test_a_call_to_myself_has_a_deadline_that_the_handler_does_not_feel(world):
    echo = Echo(slow_s=2.0)
    me = world.peer("me", echo)
    assert await me.fails("me", timeout_s=1.0) == "deadline"
    assert now() == pytest.approx(1.0)
    await asyncio.sleep(2.0)
    assert echo.ended == {("me", b"do"): 1}


def test_peers_carry_calls_between_their_links_and_their_handlers():
    async def main():
        network = SimNetwork(1, LINK)
        network.faults = Faults(loss=0.2, corrupt=0.1)
        async with contextlib.AsyncExitStack() as stack:
            peers = []
            for number in (0, 1):
                made = peer_in(network, identity(number), RunTerms("run", 3), number + 1)
                peers.append(await stack.enter_async_context(made.running()))
            caller, server = peers
            server.calls.handler = Echo()
            for number in range(20):
                payload = data_of(1000, number)
                reply = await caller.calls.ask(
                    server.me, b"%d" % number, (payload,), timeout_s=60.0, max_reply_bytes=1000
                )
                assert reply == CallReply(b"%d" % number, backwards(payload))
            assert set(server.calls.handler.served.values()) == {1}
            server.context.links.send(caller.me, pack(Frame(2, Answer(1, 99, "ok"))))
            await asyncio.sleep(1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
