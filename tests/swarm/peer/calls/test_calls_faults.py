"""On bad links, and between peers that die and come back, a call is still served at most once and
answered, or fails."""

import asyncio
import collections
import random

import pytest
from worlds.switchboard import RTT_S, Echo, Switchboard, backwards, data_of, in_a_world
from worlds.waiting import now

from farflock.swarm.messages import MAX_INLINE_BYTES, Answer, Call, Heard, Piece, Want
from farflock.swarm.peer.calls.call_server import LEASE_S, CallReply
from farflock.swarm.peer.calls.calls import KEEP_S, RESEND_S, CallFailed
from farflock.swarm.sim.network import Faults, LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

# Losses, duplicates and reordering.


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for size in (7, MAX_INLINE_BYTES + 1) for kind in (Call, Answer, Heard)]
    + [(kind, MAX_INLINE_BYTES + 1) for kind in (Want, Piece)],
)
def test_a_lost_message_of_any_kind_costs_time_only(kind, size):
    async def main(world):
        caller, server = world.pair()
        world.lose(kind, times=2)
        payload = data_of(size)
        reply = await caller.ask("server", b"do", (payload,))
        assert reply == CallReply(b"do", backwards(payload))
        assert world.sent[kind] >= 2 if kind is not Heard else world.sent[kind] == 1
        assert set(server.calls.handler.served.values()) == {1}

    in_a_world(main)()


@in_a_world
async def test_an_answer_that_is_not_heard_is_kept_for_its_lease_only_and_never_made_twice(world):
    caller, server = world.pair()
    world.lose(Heard)
    await caller.ask("server", b"do", (data_of(1000),))
    await asyncio.sleep(LEASE_S - 1.0)
    assert server.kept == (0, 1, 1000, 1000, 0)
    await asyncio.sleep(1.5)
    assert not any(server.kept)
    world.say(caller, server, Call(0, b"do"))
    await asyncio.sleep(1.0)
    assert set(server.calls.handler.judged.values()) == {1}


@in_a_world
async def test_an_answer_that_takes_longer_than_its_lease_to_fetch_is_kept_meanwhile(world):
    world.network.set_link("caller", LinkModel(down_bytes_per_s=3e5))
    caller, server = world.pair(
        Echo(answer=CallReply(b"", tuple(data_of(3_000_000, place) for place in range(4))))
    )
    reply = await caller.ask("server", timeout_s=120.0)
    assert sum(map(len, reply.payloads)) == 12_000_000
    assert now() > LEASE_S + KEEP_S / 2
    assert set(server.calls.handler.served.values()) == {1}


@in_a_world
async def test_a_late_copy_of_a_call_is_served_neither_after_it_was_heard_nor_after_it_was_given_up(
    world,
):
    caller, server = world.pair()
    await caller.ask("server")
    world.say(caller, server, Heard(1))  # overtakes its call
    await asyncio.sleep(RTT_S)
    for number in (0, 1):
        world.say(caller, server, Call(number, b"again"))
    await asyncio.sleep(1.0)
    assert server.calls.handler.judged == {("caller", b"do"): 1}
    assert caller.context.counters["dropped: answer to no call"] == 2, (
        "a caller that still waited would wait in vain"
    )


@in_a_world
async def test_a_call_whose_answer_is_gone_fails_before_its_deadline(world):
    caller, server = world.pair()
    world.lose(Answer, times=10**6)
    asking = asyncio.create_task(caller.fails("server", timeout_s=1000.0))
    await asyncio.sleep(1.0)
    server.calls.receive("caller", caller.context.incarnation, Heard(0))  # though it did not
    world.taps.clear()
    assert await asking == "deadline"
    assert now() < 1.0 + RESEND_S + 2 * RTT_S


@pytest.mark.parametrize("seed", range(8))
def test_on_bad_links_every_call_is_answered_rightly_and_served_once(seed):
    async def main():
        world = Switchboard(seed)
        world.network.faults = Faults(loss=0.15, duplicate=0.2, reorder=0.3, delay_s=2.0)
        server = world.peer("server", Echo(slow_s=0.3))
        callers = [world.peer(name) for name in ("one", "two")]
        chance = random.Random(seed)

        async def one(caller, number):
            await asyncio.sleep(chance.uniform(0, 5))
            sizes = [chance.choice([0, 10, 200_000]) for _ in range(chance.randrange(3))]
            payloads = tuple(data_of(size, f"{caller.name}{number}") for size in sizes)
            request = b"%d" % number
            assert await caller.ask("server", request, payloads, timeout_s=300.0) == CallReply(
                request, backwards(*payloads)
            )

        await asyncio.gather(*(one(caller, number) for caller in callers for number in range(20)))
        assert len(server.calls.handler.served) == 40
        assert set(server.calls.handler.served.values()) == {1}
        assert all(world.network.fired[fault] for fault in ("loss", "duplicate", "reorder"))
        await world.empty()
        assert not world.failures

    run_virtual(main())


@pytest.mark.parametrize("seed", range(8))
def test_after_deaths_cancellations_and_losses_nothing_is_kept_anywhere(seed):
    """Two servers and two callers, each of which dies and comes back; some calls have short
    timeouts."""

    async def main():
        world, chance = Switchboard(seed), random.Random(seed)
        world.network.faults = Faults(loss=0.1, duplicate=0.1, reorder=0.2, delay_s=1.0)
        lives, echoes, ends = {}, [], collections.Counter()

        def start(name):
            echoes.append(Echo(slow_s=chance.uniform(0, 2)))
            lives[name] = world.peer(name, echoes[-1], room_bytes=600_000)

        for name in ("a", "b", "x", "y"):
            start(name)

        async def churn():
            for _ in range(12):
                await asyncio.sleep(chance.uniform(1, 8))
                name = chance.choice("abxy")
                lives[name].kill()
                await asyncio.sleep(chance.choice([0.05, 3.0, 8.0]))
                start(name)

        async def call(number):
            await asyncio.sleep(chance.uniform(0, 60))
            caller, callee = lives[chance.choice("ab")], chance.choice("xyab")
            payloads = (data_of(chance.choice([0, 1000, 300_000]), number),)
            try:
                async with asyncio.timeout(chance.choice([0.3, 2.0, 100.0])):
                    reply = await caller.ask(
                        callee, b"%d" % number, payloads, timeout_s=chance.choice([1.0, 20.0])
                    )
                assert reply == CallReply(b"%d" % number, backwards(*payloads))
                ends["ok"] += 1
            except CallFailed as failure:
                ends[failure.reason] += 1
            except TimeoutError:
                ends["cancelled"] += 1

        await asyncio.gather(churn(), *(call(number) for number in range(200)))
        assert min(ends["ok"], ends["deadline"] + ends["dial"], ends["cancelled"]) > 0, ends
        assert all(max(echo.served.values(), default=1) == 1 for echo in echoes), (
            "a life served a call twice"
        )
        await world.empty()
        assert not world.failures

    run_virtual(main())


# Restarts.


@in_a_world
async def test_a_server_that_comes_back_is_asked_anew_and_knows_nothing_of_before(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    asking = asyncio.create_task(caller.ask("server", b"do", (b"payload",)))
    await asyncio.sleep(1.5)
    assert server.calls.handler.served
    server.kill()
    await asyncio.sleep(0.5)
    successor = world.peer("server", Echo(slow_s=2.0))
    assert await asking == CallReply(b"do", backwards(b"payload"))
    assert set(successor.calls.handler.served.values()) == {1}
    assert not server.calls.handler.ended


@in_a_world
async def test_a_server_that_comes_back_without_what_it_answered_fails_the_call(world):
    caller, server = world.pair(Echo(answer=CallReply(b"", (data_of(MAX_INLINE_BYTES + 1),))))
    world.lose(Want, times=1)
    asking = asyncio.create_task(caller.fails("server", timeout_s=60.0))
    await asyncio.sleep(1.5 * RTT_S)
    server.kill()
    world.peer("server", Echo())
    assert await asking == "rpc"
    assert now() < 5.0


@in_a_world
async def test_a_caller_that_comes_back_uses_the_same_ids_and_gets_its_own_answers(world):
    caller, server = world.pair(Echo(slow_s=1.0))
    asking = asyncio.create_task(caller.ask("server", b"old"))
    await asyncio.sleep(0.5)
    caller.kill()
    asking.cancel()
    successor = world.peer("caller")
    assert (await successor.ask("server", b"new")).body == b"new"
    assert server.calls.handler.served == {("caller", b"old"): 1, ("caller", b"new"): 1}
    assert successor.context.counters["dropped: answer to no call"] == 1
