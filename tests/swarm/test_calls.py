"""A call is served at most once and answered, or fails in time with a reason; and whatever happens, nothing is kept for it."""

import asyncio
import collections
import contextlib
import random

import pytest

from farflock.swarm import serving as server_module
from farflock.swarm.calls import KEEP_S, RESEND_S, CallFailed, Calls
from farflock.swarm.chunks import Store, digest_of
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_BODY_BYTES, MAX_CHUNK_BYTES, MAX_PAYLOADS, Answer, Call, Heard, Piece, Want
from farflock.swarm.payloads import MAX_PAYLOAD_BYTES
from farflock.swarm.peer import Peer, RunTerms
from farflock.swarm.port import Port
from farflock.swarm.serving import FETCH_S, FORGET_S, LEASE_S, MAX_CALLS, MAX_CALLS_EACH, MAX_LIVES, MAX_OVER, Reply
from farflock.swarm.sim import DEAD_S, Faults, LinkModel, SimNetwork
from farflock.swarm.virtual import run_virtual

RTT_S = 0.1
LINK = LinkModel(up_bytes_per_s=1.25e8, down_bytes_per_s=1.25e8, latency_s=RTT_S / 4, jitter_s=0.0)
STALE_S = 3.0


def data_of(size, seed=0):
    return random.Random(f"{size}/{seed}").randbytes(size)


def backwards(*payloads):
    return tuple(payload[::-1] for payload in payloads[::-1])


class Echo:
    """Answers with the request and with all payloads backwards; may be slow, refuse, or raise; knows what it was asked."""

    def __init__(self, slow_s=0.0, refuse=None, answer=None):
        self.slow_s, self.refuse, self.answer = slow_s, refuse, answer
        self.judged, self.served, self.ended = collections.Counter(), collections.Counter(), collections.Counter()

    def admit(self, caller, request, sizes):
        self.judged[caller, request] += 1
        if request == b"bad":
            raise RuntimeError("cannot judge")
        return self.refuse

    async def serve(self, caller, request, payloads):
        self.served[caller, request] += 1
        await asyncio.sleep(self.slow_s)
        self.ended[caller, request] += 1
        if request == b"worse":
            raise RuntimeError("cannot do")
        return self.answer or Reply(request, backwards(*payloads))


class Life:
    """One life of one peer: its calls on the network, with the loops that feed them; keeps no chunk that nobody pins."""

    def __init__(self, world, name, incarnation, handler, options):
        self.world, self.name = world, name
        links, self.store = world.network.links(name), Store(0)
        self.tasks = set()
        self.port = Port("run", 0, incarnation, links, self.store, self.spawn)
        self.calls = Calls(self.port, **options)
        self.calls.handler = handler
        self.spawn(self.receive(links))
        self.spawn(self.tick())

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.world.failures.append(task.exception())

    async def receive(self, links):
        while True:
            sender, packed = await links.receive()
            frame = unpack(packed)
            if isinstance(frame.message, Call | Answer | Heard):
                self.calls.receive(sender, frame.incarnation, frame.message)
            else:
                self.port.chunks.receive(sender, frame.message, frame.body)

    async def tick(self):
        while True:
            self.calls.tick()
            await asyncio.sleep(0.1)

    async def ask(self, peer, request=b"do", payloads=(), timeout_s=30.0, max_reply_bytes=2**26):
        return await self.calls.ask(peer, request, payloads, timeout_s=timeout_s, max_reply_bytes=max_reply_bytes)

    async def fails(self, peer, *args, **options):
        with pytest.raises(CallFailed) as failure:
            await self.ask(peer, *args, **options)
        return failure.value.reason

    @property
    def kept(self):
        """Everything that is kept for any call."""
        calls, serving = self.calls, self.calls._serving
        busy = 0 if calls._sending.idle else 1
        return len(calls._asked), len(serving._served), serving._held_bytes, self.store.size_bytes, busy

    def kill(self):
        self.world.network.kill(self.name)
        for task in self.tasks:
            task.cancel()


class World:
    """Peers by name; the first tap that returns something decides what becomes of a message."""

    def __init__(self, seed=1, link=LINK):
        self.network, self.failures, self.lives, self.incarnation = SimNetwork(seed, link), [], [], 10
        self.sent, self.taps = collections.Counter(), []
        self.network.tap = self.tap

    def peer(self, name, handler=None, **options):
        self.incarnation += 1
        life = Life(self, name, self.incarnation, handler, options)
        self.lives.append(life)
        return life

    def pair(self, handler=None, **options):
        return self.peer("caller"), self.peer("server", handler or Echo(), **options)

    def tap(self, now_s, sender, to, packed):
        message = unpack(packed).message
        self.sent[type(message)] += 1
        return None if any(tap(sender, message) for tap in self.taps) else packed

    def lose(self, kind, times=1):
        """Lose the next so many messages of a kind."""
        left = [times]

        def tap(sender, message):
            left[0] -= isinstance(message, kind) and left[0] >= 0
            return isinstance(message, kind) and left[0] >= 0

        self.taps.append(tap)

    def say(self, sender, to, message):
        """Have a peer say what its calls would not."""
        sender.port.send(to.name, message)

    async def empty(self, within_s=LEASE_S + DEAD_S + 1.0):
        """Wait until nothing is kept for any call at those who live, which must be soon."""
        living = [life for life in self.lives if life.tasks]
        begun_s = now()
        while any(any(life.kept) for life in living):
            assert now() - begun_s < within_s, f"kept: {[(life.name, life.kept) for life in living]}"
            await asyncio.sleep(0.05)


def in_a_world(main):
    """Run a test `main(world)` in virtual time; nothing may be kept for any call after it."""

    def test():
        async def whole():
            world = World()
            await main(world)
            await world.empty()
            assert not world.failures

        run_virtual(whole())

    test.__doc__ = main.__doc__
    return test


def now():
    return asyncio.get_running_loop().time()


# In the quiet.


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1,), (70_000, 0, 70_000), (MAX_CHUNK_BYTES,), (2 * MAX_CHUNK_BYTES + 1, 5), (9,) * MAX_PAYLOADS],
    ids=str,
)
def test_a_call_brings_back_what_its_handler_returns(sizes):
    async def main(world):
        caller, server = world.pair()
        payloads = tuple(data_of(size, place) for place, size in enumerate(sizes))
        assert await caller.ask("server", b"do", payloads) == Reply(b"do", backwards(*payloads))
        assert server.calls.handler.served == {("caller", b"do"): 1}
        await world.empty(within_s=RTT_S + 0.1)

    in_a_world(main)()


@pytest.mark.parametrize(
    ("handler", "payloads", "round_trips"),
    [
        (Echo(), (), 1),
        (Echo(refuse=b"busy"), (b"much",), 1),
        (Echo(answer=Reply(b"done")), (b"much",), 2),
        (Echo(answer=Reply(b"", (b"more",))), (), 2),
        (Echo(), (b"much", b"more"), 3),
    ],
    ids=["no payload", "refused", "payload there", "payload back", "payloads both ways"],
)
def test_a_call_takes_a_round_trip_and_one_more_for_the_payloads_of_each_way(handler, payloads, round_trips):
    async def main(world):
        caller, _ = world.pair(handler)
        await caller.ask("server", b"do", payloads)
        assert now() == pytest.approx(round_trips * RTT_S, abs=0.001)
        await asyncio.sleep(RTT_S)
        assert (world.sent[Call], world.sent[Answer], world.sent[Heard]) == (1, 1, 1)

    in_a_world(main)()


@in_a_world
async def test_a_refusal_comes_before_any_payload_travels(world):
    caller, server = world.pair(Echo(refuse=b"busy"))
    assert await caller.ask("server", b"do", (data_of(1_000_000),)) == Reply(b"busy")
    assert not server.calls.handler.served
    assert world.sent[Want] == world.sent[Piece] == 0


@in_a_world
async def test_many_calls_at_once_get_each_their_own_answer(world):
    caller, server = world.pair(Echo(slow_s=1.0))
    requests = [b"%d" % number for number in range(50)]
    replies = await asyncio.gather(*(caller.ask("server", request, (request * 100,)) for request in requests))
    assert replies == [Reply(request, backwards(request * 100)) for request in requests]
    assert set(server.calls.handler.served.values()) == {1}


@in_a_world
async def test_the_same_payload_twice_travels_once(world):
    caller, _ = world.pair(Echo(answer=Reply(b"done")))
    await caller.ask("server", b"do", (b"x" * 1000,) * 4)
    assert world.sent[Piece] == 1


# What cannot be done.


@pytest.mark.parametrize(
    ("handler", "request_bytes"),
    [
        (None, b"do"),
        (Echo(), b"bad"),
        (Echo(), b"worse"),
        (Echo(answer=Reply(bytes(MAX_BODY_BYTES + 1))), b"do"),
        (Echo(answer=Reply(b"", (b"",) * (MAX_PAYLOADS + 1))), b"do"),
        (Echo(refuse=bytes(MAX_BODY_BYTES + 1)), b"do"),
    ],
    ids=["no handler", "admit raises", "serve raises", "body too long", "too many payloads", "refusal too long"],
)
@pytest.mark.parametrize("callee", ["server", "caller"])
def test_a_call_that_its_server_cannot_do_fails_at_once_and_harms_nothing_else(handler, request_bytes, callee):
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
        patch.setattr(server_module.log, "exception", lambda text, *args: records.append(text % args))
        assert await caller.fails("server", b"bad") == await caller.fails("server", b"worse") == "rpc"
    assert records == ["a call of caller could not be judged", "a call of caller failed"]


@pytest.mark.parametrize("callee", ["server", "caller"])
def test_an_answer_with_more_payload_than_agreed_fails_unfetched(callee):
    async def main(world):
        caller, server = world.pair(Echo(answer=Reply(b"", (data_of(600), data_of(500)))))
        caller.calls.handler = server.calls.handler
        assert await caller.fails(callee, max_reply_bytes=1099) == "rpc"
        assert world.sent[Want] == 0
        assert (await caller.ask(callee, max_reply_bytes=1100)).payloads == (data_of(600), data_of(500))

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
    with pytest.raises(ValueError, match="at most 1000 bytes, got 1001; cut the batch"):
        await small.ask("server", b"", (bytes(1001),))
    assert not world.sent
    assert await caller.fails("small", b"", (bytes(1001),)) == "rpc", "it would be asked again for ever"


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
async def test_nobody_there_fails_at_the_deadline_and_who_is_dead_at_once(world):
    caller, server = world.pair()
    assert await caller.fails("nobody", timeout_s=2.0) == "deadline"
    server.kill()
    await asyncio.sleep(DEAD_S + 0.1)
    begun_s = now()
    assert await caller.fails("server", b"do", (b"payload",)) == "dial"
    assert now() == begun_s
    assert not any(caller.kept)


@pytest.mark.parametrize(
    "killed_s", [0.5, 1.5, 2.5, 4.5], ids=["call under way", "payload under way", "serving", "answer under way"]
)
def test_a_server_that_dies_is_noticed_whatever_it_was_doing(killed_s):
    async def main(world):
        caller, server = world.pair(Echo(slow_s=1.0))
        if killed_s < 1:
            world.lose(Call, 10)
        else:
            world.network.set_link("caller", LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6))
        asking = asyncio.create_task(caller.fails("server", b"do", (data_of(900_000),), timeout_s=60.0))
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
    "cancelled_s", [0.01, 1.5, 2.5, 4.5], ids=["call under way", "payload under way", "serving", "answer under way"]
)
@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_of_a_caller_that_goes_nothing_is_kept_and_a_handler_is_not_disturbed(cancelled_s, how):
    async def main(world):
        world.network.set_link("caller", LinkModel(up_bytes_per_s=0.5e6, down_bytes_per_s=0.5e6))
        caller, server = world.pair(Echo(slow_s=1.0))
        asking = asyncio.create_task(caller.ask("server", b"do", (data_of(900_000),), timeout_s=60.0))
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
async def test_payloads_of_a_call_that_was_given_up_are_fetched_no_further_though_they_could_be(world):
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
    caller, server = world.pair(Echo(answer=Reply(b"", (data_of(3000),))), room_bytes=3000)
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
        assert caller.port.life("server") == "suspect"
        world.network.cont("server")
    assert await asking == Reply(b"do", backwards(data_of(900_000)))
    assert now() > 6.0 + STALE_S
    assert set(server.calls.handler.served.values()) == {1}


# Losses, copies, disorder.


@pytest.mark.parametrize("kind", [Call, Answer, Want, Piece, Heard])
def test_a_lost_message_of_any_kind_costs_time_only(kind):
    async def main(world):
        caller, server = world.pair()
        world.lose(kind, times=2)
        assert await caller.ask("server", b"do", (b"payload",)) == Reply(b"do", backwards(b"payload"))
        assert world.sent[kind] >= 2 if kind is not Heard else world.sent[kind] == 1
        assert set(server.calls.handler.served.values()) == {1}

    in_a_world(main)()


@in_a_world
async def test_an_answer_that_nobody_hears_is_kept_for_its_lease_only_and_never_made_twice(world):
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
    caller, server = world.pair(Echo(answer=Reply(b"", tuple(data_of(3_000_000, place) for place in range(4)))))
    reply = await caller.ask("server", timeout_s=120.0)
    assert sum(map(len, reply.payloads)) == 12_000_000
    assert now() > LEASE_S + KEEP_S / 2
    assert set(server.calls.handler.served.values()) == {1}


@in_a_world
async def test_a_late_copy_of_a_call_is_served_neither_after_it_was_heard_nor_after_it_was_given_up(world):
    caller, server = world.pair()
    await caller.ask("server")
    world.say(caller, server, Heard(1))  # overtakes its call
    await asyncio.sleep(RTT_S)
    for number in (0, 1):
        world.say(caller, server, Call(number, b"again"))
    await asyncio.sleep(1.0)
    assert server.calls.handler.judged == {("caller", b"do"): 1}
    assert caller.port.counters["dropped: answer to no call"] == 2, "who still waited would wait in vain"


@in_a_world
async def test_a_call_whose_answer_is_gone_fails_before_its_deadline(world):
    caller, server = world.pair()
    world.lose(Answer, times=10**6)
    asking = asyncio.create_task(caller.fails("server", timeout_s=1000.0))
    await asyncio.sleep(1.0)
    server.calls._serving._end(("caller", caller.port.incarnation, 0))  # as at the end of its lease
    world.taps.clear()
    assert await asking == "deadline"
    assert now() < 1.0 + RESEND_S + 2 * RTT_S


@pytest.mark.parametrize("seed", range(8))
def test_on_bad_links_every_call_is_answered_rightly_and_served_once(seed):
    async def main():
        world = World(seed)
        world.network.faults = Faults(loss=0.15, duplicate=0.2, reorder=0.3, delay_s=2.0)
        server = world.peer("server", Echo(slow_s=0.3))
        callers = [world.peer(name) for name in ("one", "two")]
        chance = random.Random(seed)

        async def one(caller, number):
            await asyncio.sleep(chance.uniform(0, 5))
            sizes = [chance.choice([0, 10, 200_000]) for _ in range(chance.randrange(3))]
            payloads = tuple(data_of(size, f"{caller.name}{number}") for size in sizes)
            request = b"%d" % number
            assert await caller.ask("server", request, payloads, timeout_s=300.0) == Reply(
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
    """Two servers and two callers, each of which dies and comes back; some callers' patience is short."""

    async def main():
        world, chance = World(seed), random.Random(seed)
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
                    reply = await caller.ask(callee, b"%d" % number, payloads, timeout_s=chance.choice([1.0, 20.0]))
                assert reply == Reply(b"%d" % number, backwards(*payloads))
                ends["ok"] += 1
            except CallFailed as failure:
                ends[failure.reason] += 1
            except TimeoutError:
                ends["cancelled"] += 1

        await asyncio.gather(churn(), *(call(number) for number in range(200)))
        assert min(ends["ok"], ends["deadline"] + ends["dial"], ends["cancelled"]) > 0, ends
        assert all(max(echo.served.values(), default=1) == 1 for echo in echoes), "a life served a call twice"
        await world.empty()
        assert not world.failures

    run_virtual(main())


# Lives.


@in_a_world
async def test_a_server_that_comes_back_is_asked_anew_and_knows_nothing_of_before(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    asking = asyncio.create_task(caller.ask("server", b"do", (b"payload",)))
    await asyncio.sleep(1.5)
    assert server.calls.handler.served
    server.kill()
    await asyncio.sleep(0.5)
    successor = world.peer("server", Echo(slow_s=2.0))
    assert await asking == Reply(b"do", backwards(b"payload"))
    assert set(successor.calls.handler.served.values()) == {1}
    assert not server.calls.handler.ended


@in_a_world
async def test_a_server_that_comes_back_without_what_it_answered_fails_the_call(world):
    caller, server = world.pair(Echo(answer=Reply(b"", (data_of(1000),))))
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
    assert successor.port.counters["dropped: answer to no call"] == 1


# Strangers and liars.


@in_a_world
async def test_an_answer_counts_only_from_who_was_asked_and_for_the_call_and_the_life_that_asked(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    liar = world.peer("liar")
    asking = asyncio.create_task(caller.ask("server", b"do"))
    await asyncio.sleep(RTT_S)
    mine = caller.port.incarnation
    world.say(liar, caller, Answer(mine, 0, "ok", b"lie"))
    world.say(liar, caller, Answer(mine, 0, "failed"))
    world.say(liar, caller, Heard(0))
    world.say(server, caller, Answer(mine, 1, "ok", b"lie"))
    world.say(server, caller, Answer(mine - 1, 0, "ok", b"lie"))
    assert (await asking).body == b"do"
    assert caller.port.counters["dropped: answer to no call"] == 4


@in_a_world
async def test_nobody_ends_the_call_of_another_peer_or_of_another_life(world):
    caller, server = world.pair(Echo(slow_s=2.0))
    liar = world.peer("liar")
    asking = asyncio.create_task(caller.ask("server", b"do"))
    await asyncio.sleep(RTT_S)
    world.say(liar, server, Heard(0))
    server.calls.receive("caller", caller.port.incarnation + 1, Heard(0))
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
        answer = server.calls._serving._served["caller", liar.port.incarnation, 0].answer
        assert answer.verdict == "late"
        for life in (liar, server):
            life.store.release("mine")

    in_a_world(main)()


@in_a_world
async def test_payloads_that_never_come_are_waited_for_only_so_long(world):
    """The caller holds the chunk, but says that it is larger: its pieces fit no buffer of that size."""
    liar, server = world.pair()
    digest = liar.store.put(b"held", "mine")
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
        ((((digest_of(b"other"), 9),),), "deadline"),
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
        world.say(liar, caller, Answer(caller.port.incarnation, 0, "ok", b"", payloads))
        assert await asking == reason
        for life in (caller, liar):
            life.store.release("mine")

    in_a_world(main)()


# Bounds.


@in_a_world
async def test_who_asks_too_much_at_once_is_served_when_there_is_room(world):
    caller, server = world.pair(Echo(slow_s=3.0))
    requests = [b"%d" % number for number in range(MAX_CALLS_EACH + 10)]
    replies = asyncio.gather(*(caller.ask("server", request) for request in requests))
    await asyncio.sleep(2.0)
    assert len(server.calls.handler.served) == MAX_CALLS_EACH
    assert (await world.peer("other").ask("server", b"do")).body == b"do", "one caller fills it for all others"
    assert [reply.body for reply in await replies] == requests
    assert now() < 3.0 + 3.0 + 2 * RESEND_S
    assert set(server.calls.handler.served.values()) == {1}
    assert caller.port.counters["calls to a full peer"] >= 10


@in_a_world
async def test_all_callers_together_get_no_more_than_the_server_has_room_for(world):
    server = world.peer("server", Echo(slow_s=3.0))
    callers = [world.peer(f"caller {number}") for number in range(6)]
    asking = asyncio.gather(*(caller.ask("server", b"%d" % number) for caller in callers for number in range(60)))
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
        most[1] = max(most[1], server.calls._serving._held_bytes)

    world.taps.append(look)
    payloads = [(data_of(1000, number),) for number in range(12)]
    replies = await asyncio.gather(*(caller.ask("server", b"do", mine) for mine in payloads))
    assert [reply.payloads for reply in replies] == [backwards(*mine) for mine in payloads]
    assert most == [5000, 2000]
    held = [asyncio.create_task(caller.ask("server", b"", (data_of(5000),), timeout_s=5.0)) for _ in range(1)]
    assert await caller.fails("server", b"do", (data_of(1000),), timeout_s=0.1) == "deadline"
    assert isinstance((await asyncio.gather(*held, return_exceptions=True))[0], CallFailed)


@in_a_world
async def test_of_calls_that_are_over_only_so_many_are_remembered_and_older_ones_are_refused(world):
    _, server = world.pair()
    for number in range(MAX_OVER + 10):
        server.calls.receive("caller", 1, Heard(number))
    seen = server.calls._serving._seen["caller", 1]
    assert len(seen.over) == MAX_OVER
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
    seen = server.calls._serving._seen
    for life in range(MAX_LIVES + 3):
        await asyncio.sleep(0.01)
        server.calls.receive("caller", life, Heard(0))
    assert list(seen) == [("caller", life) for life in range(3, MAX_LIVES + 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "MAX_CALLERS", MAX_LIVES)
        other = world.peer("other")
        assert await other.fails("server", timeout_s=1.0) == "deadline"
        assert other.port.counters["calls to a full peer"] > 0
    assert not server.calls.handler.judged
    assert len(seen) == MAX_LIVES
    await asyncio.sleep(FORGET_S + 1.0)
    assert not seen
    assert (await other.ask("server", b"do")).body == b"do"


# To myself, and in a whole peer.


@in_a_world
async def test_a_call_to_myself_goes_to_my_handler_and_over_no_link(world):
    echo = Echo(slow_s=1.0)
    me = world.peer("me", echo)
    payload = data_of(1000)
    assert (await me.ask("me", b"do", (payload,))).payloads == backwards(payload)
    echo.refuse = b"busy"
    assert await me.ask("me", b"do", (payload,)) == Reply(b"busy")
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
            for number in (1, 2):
                owner = Identity.from_seed(bytes([number]) * 32)
                made = Peer(
                    RunTerms("run", 3), owner, network.links(owner.peer), None, incarnation=number, record=lambda: b""
                )
                peers.append(await stack.enter_async_context(made.running()))
            caller, server = peers
            server.calls.handler = Echo()
            for number in range(20):
                payload = data_of(1000, number)
                reply = await caller.calls.ask(
                    server.me, b"%d" % number, (payload,), timeout_s=60.0, max_reply_bytes=1000
                )
                assert reply == Reply(b"%d" % number, backwards(payload))
            assert set(server.calls.handler.served.values()) == {1}
            server.port.links.send(caller.me, pack(Frame(2, Answer(1, 99, "ok"))))
            await asyncio.sleep(1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
