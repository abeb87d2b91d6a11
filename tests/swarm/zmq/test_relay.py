"""Real sockets on loopback: two peers that cannot dial each other, and a third that forwards for
them."""

import asyncio
import time

import pytest
from worlds.fleet import FRAME, got, identity, noticed, run, silent, until
from worlds.waiting import LIMIT_S

from farflock.swarm.zmq import partner as zmq_partner
from farflock.swarm.zmq import sending as zmq_sending
from farflock.swarm.zmq import upkeep as zmq_upkeep
from farflock.swarm.zmq.forward import MAX_FORWARD_BYTES, pack_forward
from farflock.swarm.zmq.message import FORWARD, FORWARDED

pytestmark = pytest.mark.net


async def hidden_pair(fleet, *relays):
    """Two peers that listen nowhere and name these relays."""
    pair = [await fleet.peer(1, listen=None), await fleet.peer(2, listen=None)]
    for links in pair:
        for relay in relays:
            assert links.learn(relay.record())
    records = [links.record(relays=[relay.me for relay in relays]) for links in pair]
    assert pair[0].learn(records[1])
    assert pair[1].learn(records[0])
    return pair


async def triangle(fleet, **options):
    relay = await fleet.peer(3, **options)
    a, b = await hidden_pair(fleet, relay)
    assert a.send(b.me, b"first")
    assert await got(b) == (a.me, b"first")
    return a, b, relay


def test_frames_arrive_through_the_relay_in_both_directions_with_their_true_sender():
    async def main(fleet):
        a, b, relay = await triangle(fleet)
        assert b.send(a.me, b"back")
        assert await got(a) == (b.me, b"back")
        assert await b.send_bulk(a.me, FRAME, LIMIT_S)
        assert await got(a) == (b.me, FRAME)
        for one, other in ((a, b), (b, a)):
            assert (one.road(other.me), one.life(other.me)) == ("forwarded", "alive")
            await until(lambda one=one, other=other: one.rtt_s(other.me) is not None)
        assert await silent(relay)
        assert relay.relayed_bytes(b.me) > len(FRAME)
        assert b.traffic(a.me)["forwarded"].sent > len(FRAME)
        assert a.traffic(b.me)["forwarded"].received > len(FRAME)

    run(main)


def test_the_relay_sees_no_content():
    async def main(fleet):
        relay = await fleet.peer(3)
        seen, forward = [], relay.detours.forward
        relay.detours.forward = lambda sender, lane, body, now_s: (
            seen.append(bytes(body)),
            forward(sender, lane, body, now_s),
        )
        a, b = await hidden_pair(fleet, relay)
        assert a.send(b.me, b"attack at dawn")
        assert await got(b) == (a.me, b"attack at dawn")
        assert seen
        assert not any(b"attack" in body for body in seen)

    run(main)


def test_16_mb_pass_the_relay_without_a_drop(record_property):
    async def main(fleet):
        a, b, relay = await triangle(fleet)
        begun_s, count = time.monotonic(), 64

        async def feed():
            for number in range(count):
                assert await a.send_bulk(b.me, bytes([number]) + FRAME[1:], LIMIT_S)

        feeding = asyncio.create_task(feed())
        for number in range(count):
            assert (await got(b))[1] == bytes([number]) + FRAME[1:]
        await feeding
        record_property(
            "rate", f"{count * len(FRAME) / (time.monotonic() - begun_s) / 1e6:.0f} MB/s"
        )
        assert not relay.counters
        assert not b.counters

    run(main)


def test_a_peer_that_cannot_be_dialled_is_reached_by_a_relay_that_was_not_named(monkeypatch):
    monkeypatch.setattr(zmq_partner, "DIAL_S", 0.5)

    async def main(fleet):
        relay = await fleet.peer(3)
        a = await fleet.peer(1, advertise=["127.0.0.3"])  # no peer listens there
        b = await fleet.peer(2, advertise=["127.0.0.3"])
        for links in (a, b):
            links.learn(relay.record())
            assert links.send(relay.me, b"here I am")
            await got(relay)
        a.learn(b.record())
        b.learn(a.record())
        assert a.send(b.me, b"x")
        assert await got(b) == (a.me, b"x")
        assert a.road(b.me) == "forwarded"

    run(main)


def test_another_relay_takes_over_when_one_goes():
    async def main(fleet):
        first, second = await fleet.peer(3), await fleet.peer(4)
        a, b = await hidden_pair(fleet, first, second)
        assert a.send(b.me, b"x")
        assert await got(b) == (a.me, b"x")
        used = {first.me: first, second.me: second}[a.table.partners[b.me].via]
        await used.close()
        assert a.send(b.me, b"y")
        await until(lambda: a.road(b.me) == "forwarded" and a.table.partners[b.me].via != used.me)
        await until(lambda: a.life(b.me) == "alive")
        assert a.send(b.me, b"z")
        frames = []
        while b"z" not in frames:
            frames.append((await got(b))[1])

    run(main)


def test_silence_on_the_forwarded_road_is_suspect_then_dead_then_alive_again(monkeypatch):
    monkeypatch.setattr(zmq_partner, "DEAD_S", 2.0)
    monkeypatch.setattr(zmq_upkeep, "DEAD_S", 2.0)
    monkeypatch.setattr(zmq_sending, "DEAD_S", 2.0)

    async def main(fleet):
        a, b, relay = await triangle(fleet)
        relay.detours.relay = False
        await noticed(a, b.me)
        await until(lambda: a.life(b.me) == "dead")
        relay.detours.relay = True
        await until(lambda: a.life(b.me) == "alive")

    run(main)


def test_a_partner_that_starts_anew_is_reached_again():
    async def main(fleet):
        a, b, relay = await triangle(fleet)
        await b.close()
        again = await fleet.peer(2, listen=None, sequence=50)
        again.learn(relay.record())
        again.learn(a.record())
        record = again.record(relays=[relay.me])
        assert a.learn(record)
        assert again.send(a.me, b"I am back")
        assert await got(a) == (again.me, b"I am back")
        assert a.send(again.me, b"welcome")
        assert await got(again) == (a.me, b"welcome")

    run(main)


def test_the_direct_road_is_taken_as_soon_as_there_is_one():
    async def main(fleet):
        a, b, relay = await triangle(fleet)
        reachable = await fleet.peer(5)
        assert b.learn(reachable.record())
        await b.close()
        back = await fleet.peer(2, sequence=50)
        assert a.learn(back.record(relays=[relay.me]))
        await until(lambda: a.road(back.me) == "direct")
        assert a.send(back.me, b"x")
        assert await got(back) == (a.me, b"x")

    run(main)


def test_a_relay_that_does_not_want_to_forwards_nothing():
    async def main(fleet):
        relay = await fleet.peer(3, relay=False)
        a, b = await hidden_pair(fleet, relay)
        assert a.send(b.me, b"x")
        await until(lambda: relay.counters["forward: not a relay"])
        assert await silent(b)
        assert a.road(b.me) == "none"

    run(main)


def test_a_sender_over_its_budget_is_dropped_and_the_others_are_served():
    async def main(fleet):
        begun_s, rate = time.monotonic(), MAX_FORWARD_BYTES  # a burst is two frames
        a, b, relay = await triangle(fleet, forward_bytes_per_s=rate)
        frames = [a.send_bulk(b.me, FRAME, LIMIT_S) for _ in range(8)]
        sending = asyncio.gather(*frames)
        await until(lambda: relay.counters["forward: over budget"])
        assert b.send(a.me, b"x")
        assert await got(a) == (b.me, b"x")
        assert relay.relayed_bytes(a.me) < rate * (1 + time.monotonic() - begun_s)
        sending.cancel()

    run(main)


@pytest.mark.parametrize("trick", ["alter", "replay", "reflect", "swap sender", "truncate"])
def test_a_lying_relay_gets_nothing_accepted(trick):
    async def main(fleet):
        a, b, relay = await triangle(fleet)
        detours, honest = relay.detours, relay.detours.forward

        def lie(sender, lane, body, now_s):
            payload = bytes(body[32:])
            target = relay.table.partners[b.me if sender.peer == a.me else a.me].best(lane)
            if trick == "alter":
                target.write(
                    pack_forward(FORWARDED, sender.peer, payload[:-1] + bytes([payload[-1] ^ 1]))
                )
            elif trick == "replay":
                honest(sender, lane, body, now_s)
                target.write(pack_forward(FORWARDED, sender.peer, payload))
            elif trick == "reflect":
                sender.best(lane).write(pack_forward(FORWARDED, target.owner, payload))
            elif trick == "swap sender":
                target.write(pack_forward(FORWARDED, relay.me, payload))
            else:
                target.write(pack_forward(FORWARDED, sender.peer, payload[: len(payload) // 2]))

        detours.forward = lie
        assert a.send(b.me, b"exactly once at most")
        await until(lambda: a.counters["bad seal"] or b.counters["bad seal"])
        if trick == "replay":
            assert await got(b) == (a.me, b"exactly once at most")
        assert await silent(b, 1.0)
        assert await silent(a, 0.1)

    run(main)


def test_frames_without_a_recipient_or_sense_are_dropped_by_the_relay():
    async def main(fleet):
        relay = await fleet.peer(3)
        guest = fleet.stranger(relay)
        await guest.introduce()
        await guest.say(FORWARD + b"short")
        await guest.say(pack_forward(FORWARD, identity(5).peer, b"\x01hello"))
        await guest.say(pack_forward(FORWARD, relay.me, b"\x01hello"))
        await guest.say(pack_forward(FORWARDED, identity(5).peer, b"\x02sealed"))
        await guest.say(pack_forward(FORWARDED, identity(5).peer, b"\x01" + bytes(192)))
        await until(lambda: relay.counters["bad seal"] == 2)
        assert relay.counters["forward: bad frame"] == 1
        assert relay.counters["forward: destination not connected"] == 2
        assert set(relay.table.partners) == {guest.owner.peer}  # no invented sender takes room

    run(main)


def test_a_refused_peer_is_refused_on_the_forwarded_road_too():
    async def main(fleet):
        a, b, _relay = await triangle(fleet)
        b.refuse(a.me)
        a.send(b.me, b"x")
        await until(lambda: b.counters["bad seal"])
        assert await silent(b)
        await noticed(a, b.me)

    run(main)


def test_a_budget_below_one_frame_is_refused_at_the_start():
    async def main(fleet):
        with pytest.raises(ValueError, match="relay=False"):
            await fleet.peer(1, forward_bytes_per_s=1000)

    run(main)
