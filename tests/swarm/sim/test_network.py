"""The simulated network: frames take the time that their bytes and the lines imply, and the seed
decides which are lost."""

import asyncio
import collections
import random

import pytest
from worlds.waiting import now

from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.sim.network import (
    DEAD_S,
    HELD_FRAMES,
    INBOX_FRAMES,
    NOTICE_S,
    OUTBOX_BYTES,
    SUSPECT_S,
    Faults,
    LinkModel,
    SimNetwork,
)
from farflock.swarm.sim.virtual_time import run_virtual

QUIET = LinkModel(up_bytes_per_s=1e6, down_bytes_per_s=1e9, latency_s=0.05, jitter_s=0.0)


class Net:
    """Peers a, b and c on one network; what arrives where, and when."""

    def __init__(self, link=QUIET, seed=1, **faults):
        self.network = SimNetwork(seed, link)
        self.network.faults = Faults(**faults)
        self.arrived = collections.defaultdict(list)  # by receiver: (time, sender, frame)
        self.readers = {}
        for peer in "abc":
            self.begin(peer)

    def begin(self, peer):
        """Begin a life of a peer that reads whatever comes."""
        line = self.network.links(peer)
        if peer in self.readers:
            self.readers[peer].cancel()
        self.readers[peer] = asyncio.create_task(self.read(line))
        setattr(self, peer, line)
        return line

    async def read(self, line):
        while True:
            sender, frame = await line.receive()
            self.arrived[line.me].append((now(), sender, frame))

    def frames(self, peer):
        return [frame for _, _, frame in self.arrived[peer]]

    def times(self, peer):
        return [at_s for at_s, _, _ in self.arrived[peer]]


def on_a_net(link=QUIET, **options):
    """Run a test `main(net)` in virtual time on a network of three."""

    def decorate(main):
        def test():
            async def whole():
                await main(Net(link, **options))

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


# Time.


@on_a_net(LinkModel(up_bytes_per_s=1000, down_bytes_per_s=500, latency_s=0.25, jitter_s=0))
async def test_a_frame_takes_its_bytes_over_both_rates_and_both_latencies(net):
    assert net.a.send("b", bytes(1000))
    await asyncio.sleep(10)
    assert net.times("b") == [pytest.approx(1.0 + 0.25 + 0.25 + 2.0)]
    assert net.arrived["b"][0][1:] == ("a", bytes(1000))
    assert (net.a.sent_bytes, net.a.sent_frames, net.b.received_bytes) == (1000, 1, 1000)


@on_a_net(LinkModel(up_bytes_per_s=1e9, down_bytes_per_s=1e9, latency_s=0.1, jitter_s=0.05))
async def test_jitter_of_both_lines_adds_up_to_so_much_and_is_drawn_anew(net):
    for _ in range(200):
        net.a.send("b", b"x")
    await asyncio.sleep(10)
    assert all(0.2 <= at_s <= 0.3 + 1e-6 for at_s in net.times("b"))
    assert max(net.times("b")) - min(net.times("b")) > 0.08


@on_a_net()
async def test_bulk_waits_for_its_turn_on_the_uplink_and_control_overtakes_it(net):
    for number in range(4):
        assert await net.a.send_bulk("b", bytes([number]) * 100_000, 1.0)
    assert net.a.send("b", b"control")
    await asyncio.sleep(10)
    assert [frame[:7] for frame in net.frames("b")] == [
        b"control",
        *(bytes([number]) * 7 for number in range(4)),
    ]
    assert net.times("b")[1:] == [pytest.approx(0.1 * turn + 0.1, abs=1e-3) for turn in range(1, 5)]


@on_a_net(LinkModel(up_bytes_per_s=1e9, down_bytes_per_s=1e6, latency_s=0.0, jitter_s=0.0))
async def test_senders_share_the_downlink_of_a_receiver(net):
    await net.a.send_bulk("c", bytes(250_000), 1.0)
    await net.b.send_bulk("c", bytes(250_000), 1.0)
    await asyncio.sleep(10)
    assert net.times("c") == [pytest.approx(0.25, abs=1e-2), pytest.approx(0.5, abs=1e-2)]


@on_a_net()
async def test_a_full_outbox_makes_bulk_wait_for_room_or_for_its_timeout(net):
    frame = bytes(MAX_FRAME_BYTES)
    count = OUTBOX_BYTES // len(frame) + 1
    for _ in range(count):
        assert await net.a.send_bulk("b", frame, 0.0)
    assert now() == 0.0, "until the outbox is full no sender waits"
    assert not await net.a.send_bulk("b", frame, 0.0)
    assert await net.a.send_bulk("b", frame, 1.0)
    assert now() == pytest.approx((count * len(frame) - OUTBOX_BYTES) / 1e6)
    await asyncio.sleep(60)
    assert len(net.frames("b")) == count + 1


@on_a_net()
async def test_each_peer_may_have_another_line_and_a_line_may_become_slower(net):
    net.network.set_link("b", LinkModel(up_bytes_per_s=2e6, latency_s=0.5, jitter_s=0.0))
    assert net.a.rtt_s("c") == pytest.approx(0.2)
    assert net.a.rtt_s("b") == net.b.rtt_s("a") == pytest.approx(1.1)
    net.network.slow("b", 4.0)
    slowed = net.network.model("b")
    assert (slowed.up_bytes_per_s, slowed.down_bytes_per_s, slowed.latency_s) == (
        5e5,
        12.5e6 / 4,
        2.0,
    )
    assert net.network.model("a") == QUIET


# Loss, doubling, reordering, corruption.


@pytest.mark.parametrize(
    ("mine", "theirs", "everywhere", "share"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (0.3, 0.0, 0.0, 0.3),
        (0.0, 0.3, 0.0, 0.3),
        (0.2, 0.2, 0.2, 0.488),
        (0.0, 0.0, 1.0, 1.0),
    ],
)
def test_a_frame_must_survive_both_lines_and_the_fault_that_is_everywhere(
    mine, theirs, everywhere, share
):
    async def main():
        net = Net(loss=everywhere)
        net.network.set_link("a", LinkModel(loss=mine))
        net.network.set_link("b", LinkModel(loss=theirs))
        for _ in range(2000):
            assert net.a.send("b", b"x"), "the sender does not notice"
        await asyncio.sleep(10)
        assert len(net.frames("b")) + net.network.fired["loss"] == 2000
        assert net.network.fired["loss"] / 2000 == pytest.approx(share, abs=0.04)

    run_virtual(main())


@on_a_net(duplicate=0.25)
async def test_doubled_frames_arrive_twice_and_the_same(net):
    for number in range(400):
        net.a.send("b", number.to_bytes(2, "big"))
    await asyncio.sleep(10)
    counts = collections.Counter(net.frames("b"))
    assert set(counts) == {number.to_bytes(2, "big") for number in range(400)}
    assert max(counts.values()) == 2
    assert sum(counts.values()) == 400 + net.network.fired["duplicate"]
    assert 60 < net.network.fired["duplicate"] < 140


@on_a_net(reorder=0.2, delay_s=0.5)
async def test_reordered_frames_come_late_by_at_most_the_delay_and_all_come(net):
    sent_s = {}
    for number in range(300):
        sent_s[number.to_bytes(2, "big")] = now()
        net.a.send("b", number.to_bytes(2, "big"))
        await asyncio.sleep(0.01)
    await asyncio.sleep(10)
    assert sorted(net.frames("b")) == sorted(sent_s) != net.frames("b")
    late = [at_s - sent_s[frame] - 0.1 for at_s, _, frame in net.arrived["b"]]
    assert -1e-6 <= min(late) < 0.001
    assert 0.3 < max(late) < 0.501


@on_a_net(corrupt=1.0)
async def test_a_corrupted_frame_differs_in_one_bit_and_the_senders_copy_does_not(net):
    frame = bytes(range(200))
    for _ in range(50):
        net.a.send("b", frame)
    await asyncio.sleep(10)
    assert net.network.fired["corrupt"] == len(net.frames("b")) == 50
    for altered in net.frames("b"):
        assert (
            sum((one ^ other).bit_count() for one, other in zip(frame, altered, strict=True)) == 1
        )
    assert frame == bytes(range(200))
    assert len(set(net.frames("b"))) > 40


@on_a_net()
async def test_a_tap_sees_every_frame_and_may_alter_or_drop_it(net):
    seen = []

    def tap(at_s, sender, receiver, frame):
        seen.append((at_s, sender, receiver, frame))
        return None if frame == b"drop" else frame.upper()

    net.network.tap = tap
    for frame in (b"one", b"drop", b"two"):
        assert net.a.send("b", frame)
    await asyncio.sleep(1)
    assert net.frames("b") == [b"ONE", b"TWO"]
    assert seen == [(0.0, "a", "b", frame) for frame in (b"one", b"drop", b"two")]


# Partitions and cuts.


@on_a_net()
async def test_in_a_partition_only_peers_of_one_island_hear_each_other(net):
    net.network.partition("ab")
    for sender, receiver in (("a", "b"), ("a", "c"), ("b", "c"), ("c", "a")):
        assert getattr(net, sender).send(receiver, b"split")
    await asyncio.sleep(1)
    assert {peer: net.frames(peer) for peer in "abc"} == {"a": [], "b": [b"split"], "c": []}
    assert (net.a.road("b"), net.a.road("c")) == ("direct", "none")
    net.network.heal()
    net.c.send("a", b"healed")
    await asyncio.sleep(1)
    assert net.frames("a") == [b"healed"]


@on_a_net()
async def test_a_cut_is_silent_both_ways_and_takes_what_is_on_its_way(net):
    net.a.send("b", b"on its way")
    net.network.cut("b", "a")
    assert net.a.send("b", b"lost")
    assert net.b.send("a", b"lost")
    assert net.a.send("c", b"round about")
    await asyncio.sleep(1)
    assert net.frames("a") == net.frames("b") == []
    assert net.frames("c") == [b"round about"]
    assert net.a.dropped == {"unreachable": 1, "cut on the way": 1}


@on_a_net()
async def test_a_silent_partner_is_suspect_later_than_a_closed_one_and_dead_at_the_same_age(
    net,
):
    await asyncio.sleep(7)
    net.network.cut("a", "b")
    net.network.kill("c")
    begun_s, course = now(), []
    while now() < begun_s + 6:
        course.append((net.a.life("b"), net.a.life("c")))
        await asyncio.sleep(0.05)

    def age(lives, life):
        return lives.index(life) * 0.05

    cut, killed = zip(*course, strict=True)
    assert age(cut, "suspect") == pytest.approx(SUSPECT_S, abs=0.06)
    assert age(killed, "suspect") == pytest.approx(NOTICE_S, abs=0.06)
    assert age(cut, "dead") == age(killed, "dead") == pytest.approx(DEAD_S, abs=0.06)
    net.network.heal()
    assert net.a.life("b") == net.b.life("a") == "alive"
    assert net.a.life("c") == "dead"
    assert net.a.life("nobody") == "unknown"


@on_a_net()
async def test_a_cut_in_one_island_and_another_partition_do_not_restart_the_age_of_a_silence(net):
    net.network.cut("a", "b")
    await asyncio.sleep(3)
    net.network.partition("ac", "b")
    await asyncio.sleep(2)
    assert net.a.life("b") == "dead"
    assert net.a.life("c") == "alive"


# Ends and new lives.


@on_a_net()
async def test_a_killed_peer_sends_and_hears_nothing_more(net):
    net.a.send("b", b"on its way")
    net.b.send("a", b"on its way")
    net.network.kill("a")
    await asyncio.sleep(1)
    assert not net.b.send("a", b"x")
    assert not await net.b.send_bulk("a", b"x", 1.0)
    net.a.send("b", b"from beyond")
    await asyncio.sleep(1)
    assert net.frames("a") == net.frames("b") == []


@on_a_net()
async def test_a_new_life_begins_with_empty_queues_and_hears_nothing_that_was_meant_for_the_old_one(
    net,
):
    await net.a.send_bulk("b", bytes(200_000), 1.0)
    net.b.send("a", b"for the old one")
    old = net.a
    net.network.kill("a")
    new = net.begin("a")
    assert net.b.life("a") == "alive"
    old.send("b", b"from the old one")
    new.send("b", b"from the new one")
    net.b.send("a", b"for the new one")
    await asyncio.sleep(5)
    assert net.frames("b") == [b"from the new one"]
    assert net.frames("a") == [b"for the new one"]
    assert new.sent_bytes == len(b"from the new one")


@on_a_net()
async def test_a_stopped_peer_is_suspect_and_what_was_sent_meanwhile_flows_in_order_when_it_runs_on(
    net,
):
    net.a.send("b", b"just sent")
    net.network.stop("a")
    for number in range(3):
        assert net.b.send("a", b"%d" % number)
    await asyncio.sleep(SUSPECT_S)
    assert net.b.life("a") == net.a.life("b") == "suspect"
    await asyncio.sleep(3)
    assert net.frames("a") == net.frames("b") == []
    net.network.cont("a")
    await asyncio.sleep(1)
    assert net.frames("a") == [b"0", b"1", b"2"]
    assert net.frames("b") == [b"just sent"]
    assert net.b.life("a") == "alive"


@on_a_net()
async def test_two_stopped_peers_hear_each_other_only_when_both_run_on(net):
    net.a.send("b", b"x")
    net.network.stop("a")
    net.network.stop("b")
    await asyncio.sleep(1)
    net.network.cont("b")
    await asyncio.sleep(1)
    assert net.frames("b") == []
    net.network.cont("a")
    await asyncio.sleep(1)
    assert net.frames("b") == [b"x"]


# Limits.


@on_a_net()
async def test_a_reader_that_does_not_read_costs_a_bounded_number_of_frames(net):
    net.readers["b"].cancel()
    await asyncio.sleep(0)
    for _ in range(INBOX_FRAMES + 100):
        net.a.send("b", b"x")
    await asyncio.sleep(1)
    assert net.b.dropped["inbox full"] == 100
    net.network.stop("c")
    for _ in range(HELD_FRAMES + 100):
        net.a.send("c", b"x")
    await asyncio.sleep(1)
    net.network.cont("c")
    await asyncio.sleep(1)
    assert len(net.frames("c")) == HELD_FRAMES


# Bytes.


@pytest.mark.parametrize(
    "faults", [{}, {"loss": 0.2, "duplicate": 0.2, "reorder": 0.2, "corrupt": 0.2}]
)
def test_every_byte_that_was_sent_is_accounted_for_at_any_moment(faults):
    async def main():
        net = Net(LinkModel(up_bytes_per_s=1e5, down_bytes_per_s=1e5), **faults)
        for turn in range(60):
            net.a.send("b", bytes(turn + 1))
            await net.b.send_bulk("a", bytes(100 * turn + 1), 1.0)
            net.c.send("a", bytes(turn + 1))
            for moment, act in (
                (20, net.network.stop),
                (35, net.network.cont),
                (40, net.network.kill),
            ):
                if turn == moment:
                    act("a" if act is not net.network.kill else "b")
            assert net.network.missing_bytes() == 0
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)
        assert net.network.missing_bytes() == net.network.flying_bytes == 0
        ended = net.network.bytes
        assert ended["delivered"] == sum(net.network.line(peer).received_bytes for peer in "abc")
        assert ended["sent"] == sum(net.network.line(peer).sent_bytes for peer in "abc")
        assert ended["cut"] > 0

    run_virtual(main())


@on_a_net()
async def test_what_overflows_is_counted_as_that(net):
    net.readers["b"].cancel()
    await asyncio.sleep(0)
    for _ in range(INBOX_FRAMES + 100):
        net.a.send("b", b"xy")
    await asyncio.sleep(1)
    assert (net.network.bytes["overflowed"], net.network.missing_bytes()) == (200, 0)
    net.network.stop("c")
    for _ in range(HELD_FRAMES + 100):
        net.a.send("c", b"xy")
    await asyncio.sleep(1)
    assert (net.network.bytes["overflowed"], net.network.bytes["held"]) == (400, 2 * HELD_FRAMES)
    assert net.a.dropped["held back too many"] + net.c.dropped["held back too many"] == 100
    assert net.network.missing_bytes() == 0


@on_a_net()
async def test_what_was_held_for_a_stopped_peer_dies_with_it(net):
    net.network.stop("b")
    net.a.send("b", b"held back")
    await asyncio.sleep(1)
    net.network.kill("b")
    net.begin("b")
    net.network.stop("b")
    net.network.cont("b")
    await asyncio.sleep(1)
    assert net.arrived["b"] == []
    assert (net.network.bytes["cut"], net.network.bytes["held"], net.network.missing_bytes()) == (
        9,
        0,
        0,
    )


# Determinism.


def trace(seed, *, with_c=True):
    """Every arrival at a and b in a busy, faulty minute."""

    async def main():
        link = LinkModel(loss=0.1)
        net = Net(link, seed, duplicate=0.1, reorder=0.1, corrupt=0.1)
        for turn in range(150):
            net.a.send("b", b"ab%d" % turn)
            await net.b.send_bulk("a", b"ba%d" % turn * 50, 5.0)
            if with_c:
                net.c.send("a" if turn % 2 else "b", b"c%d" % turn)
                net.a.send("c", b"ac%d" % turn)
            if turn == 70:
                net.network.kill("b")
                net.begin("b")
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        return dict(net.arrived), dict(net.network.fired)

    return run_virtual(main())


def test_the_same_seed_gives_the_same_trace_to_the_last_bit_and_another_seed_another():
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_what_happens_between_two_peers_does_not_depend_on_what_others_do():
    def of_a_and_b(with_c):
        arrived, _ = trace(3, with_c=with_c)
        return [
            frame
            for receiver, sender in ("ba", "ab")
            for _, by, frame in arrived[receiver]
            if by == sender
        ]

    assert of_a_and_b(True) == of_a_and_b(False)


@pytest.mark.parametrize("seed", range(20))
def test_only_pairs_with_a_changed_peer_change_their_lives(seed):
    """The slow twin looks at all pairs after each event, as it does after a partition."""
    chance, peers = random.Random(seed), "abcdef"
    network, twin, islands = SimNetwork(seed), SimNetwork(seed), []

    def happen(network, what, peer, other):
        match what:
            case "partition" | "heal":
                islands[:] = [{peer, other}, {*peers} - {peer, other}] * (what == "partition")
                network.partition(*islands) if islands else network.heal()
            case "cut":
                network.cut(peer, other)
            case _:
                getattr(network, what)(peer)

    async def main():
        whats = ["links", "links", "kill", "stop", "cont", "partition", "heal", "cut"]
        for _ in range(80):
            what, (peer, other) = chance.choice(whats), chance.sample(peers, 2)
            happen(network, what, peer, other)
            happen(twin, what, peer, other)
            twin.partition(*islands)
            await asyncio.sleep(chance.choice([0.01, NOTICE_S, SUSPECT_S, DEAD_S]))
            pairs = [(one, two) for one in peers for two in peers]
            assert [network.life(*pair) for pair in pairs] == [twin.life(*pair) for pair in pairs]

    run_virtual(main())


@on_a_net()
async def test_two_endpoints_of_one_key_are_both_heard_and_hear_all_until_one_ends(net):
    first, second = net.a, net.network.beside("a")
    reading = asyncio.create_task(net.read(second))
    assert first.send("b", b"first")
    assert second.send("b", b"second")
    net.b.send("a", b"to both")
    await asyncio.sleep(1)
    assert sorted(net.frames("b")) == [b"first", b"second"]
    assert net.frames("a") == [b"to both"] * 2
    net.network.end_beside(first)
    first.send("b", b"too late")
    second.send("b", b"alone")
    net.b.send("a", b"to one")
    await asyncio.sleep(1)
    assert net.frames("b")[2:] == [b"alone"]
    assert net.frames("a")[2:] == [b"to one"]
    assert net.network.missing_bytes() == 0
    reading.cancel()
