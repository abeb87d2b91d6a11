"""Tunnels between two peers over a relay that loses, repeats, reorders and lies, the relay's meter,
and the window."""

import contextlib
import itertools
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.zmq import forward
from farflock.swarm.zmq.forward import (
    CreditWindow,
    Meter,
    Tunnel,
    is_hello,
    pack_forward,
    unpack_forward,
)
from farflock.swarm.zmq.outbox import BULK, CONTROL
from farflock.swarm.zmq.sealed import BadSeal

A, B = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2))


_seeds = itertools.count()


def made(one, other):
    """A tunnel whose keys no other tunnel has."""
    chance = random.Random(next(_seeds))
    return Tunnel(
        *(one, other.peer, "run"),
        lambda: X25519PrivateKey.from_private_bytes(chance.randbytes(32)),
    )


class Wire:
    """Two tunnels and the wire between them, which keeps every payload for the attacks."""

    def __init__(self, loss: float = 0.0, seed: int = 0) -> None:
        self.now_s = 100.0
        self.chance = random.Random(seed)
        self.loss, self.tolerant = loss, loss > 0
        self.a, self.b = made(A, B), made(B, A)
        self.log: list[tuple[Tunnel, bytes]] = []
        self.got: list[tuple[Tunnel, int, bytes]] = []

    def deliver(self, to: Tunnel, payload: bytes) -> None:
        self.log.append((to, payload))
        if self.chance.random() < self.loss:
            return
        try:
            taken = to.take(payload, self.now_s)
        except BadSeal:
            if not self.tolerant:  # after a loss one side may hold keys that the other does not
                raise
        else:
            if taken:
                self.got.append((to, *taken))

    def settle(self) -> None:
        while self.a.outgoing or self.b.outgoing:
            for one, other in ((self.a, self.b), (self.b, self.a)):
                while one.outgoing:
                    self.deliver(other, one.outgoing.popleft())

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.a.tick(self.now_s)
            self.b.tick(self.now_s)
            self.settle()
            self.now_s += 0.25

    def connect(self) -> "Wire":
        self.a.knock(self.now_s)
        self.settle()
        assert self.a.confirmed
        assert self.b.confirmed
        return self


def send(wire: Wire, sender: Tunnel, frame: bytes, lane: int = CONTROL) -> None:
    payload = sender.carry(lane, frame, wire.now_s)
    assert payload is not None
    wire.deliver(wire.b if sender is wire.a else wire.a, payload)


def test_one_knock_makes_a_road_for_both_directions_and_both_lanes():
    wire = Wire().connect()
    send(wire, wire.a, b"one")
    send(wire, wire.b, b"two")
    send(wire, wire.a, b"three", BULK)
    assert wire.got == [
        (wire.b, CONTROL, b"one"),
        (wire.a, CONTROL, b"two"),
        (wire.b, BULK, b"three"),
    ]


def test_both_may_knock_at_once():
    wire = Wire()
    wire.a.knock(wire.now_s)
    wire.b.knock(wire.now_s)
    from_a, from_b = wire.a.outgoing.popleft(), wire.b.outgoing.popleft()
    wire.deliver(wire.b, from_a)
    wire.deliver(wire.a, from_b)
    wire.settle()
    assert wire.a.confirmed
    assert wire.b.confirmed


def test_nothing_is_carried_before_the_partner_holds_the_keys():
    tunnel = made(A, B)
    tunnel.knock(0.0)
    assert tunnel.carry(CONTROL, b"x", 0.0) is None
    assert tunnel.carry(BULK, b"x", 0.0) is None


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_a_road_that_loses_half_of_everything_is_still_made(seed):
    wire = Wire(loss=0.5, seed=seed)
    while not (wire.a.confirmed and wire.b.confirmed):
        assert wire.now_s < 160.0
        wire.a.knock(wire.now_s)
        wire.run(3.0)
    assert wire.a.confirmed
    assert wire.b.confirmed
    wire.loss = 0.0
    wire.run(6.0)
    wire.tolerant = False
    send(wire, wire.a, b"x")
    assert wire.got[-1] == (wire.b, CONTROL, b"x")


def test_a_handshake_without_an_answer_is_given_up():
    tunnel = made(A, B)
    tunnel.knock(0.0)
    hellos = 0
    for tick in range(60):
        tunnel.tick(tick * 0.25)
        hellos += len(tunnel.outgoing)
        tunnel.outgoing.clear()
    assert tunnel.over(15.0, 5.0)
    assert 5 <= hellos <= 12


def test_a_road_is_over_when_it_is_silent_for_long_but_not_while_it_is_being_made():
    wire = Wire()
    wire.a.knock(wire.now_s)
    assert not wire.a.over(wire.now_s, 5.0)
    wire.settle()
    assert not wire.a.over(wire.now_s + 4.9, 5.0)
    assert wire.a.over(wire.now_s + 5.1, 5.0)


def test_a_partner_that_starts_anew_is_taken_up_again():
    wire = Wire().connect()
    wire.b = made(B, A)
    wire.b.knock(wire.now_s)
    wire.settle()
    send(wire, wire.a, b"welcome back")
    send(wire, wire.b, b"thanks")
    assert [frame for _, _, frame in wire.got] == [b"welcome back", b"thanks"]


def test_frames_sealed_just_before_a_new_session_still_open():
    wire = Wire().connect()
    late = wire.a.carry(CONTROL, b"late", wire.now_s)
    wire.now_s += 6.0
    wire.b.knock(wire.now_s)
    wire.settle()
    wire.deliver(wire.b, late)
    assert wire.got == [(wire.b, CONTROL, b"late")]


def test_every_payload_repeated_later_changes_nothing():
    wire = Wire().connect()
    for number in range(20):
        send(wire, wire.a, b"%d" % number)
        send(wire, wire.b, b"%d" % number, BULK)
    wire.run(2.0)
    seen, log = len(wire.got), list(wire.log)
    for to, payload in log:
        with contextlib.suppress(BadSeal):
            wire.deliver(to, payload)
        wire.now_s += 0.1
    wire.settle()
    assert len(wire.got) == seen
    wire.run(1.0)
    send(wire, wire.a, b"still here")
    assert wire.got[-1] == (wire.b, CONTROL, b"still here")


@given(bit=st.integers(min_value=0), which=st.sampled_from(["hello", "frame"]))
def test_an_altered_payload_is_refused_and_the_road_stays(bit, which):
    wire = Wire().connect()
    if which == "frame":
        payload = wire.a.carry(CONTROL, b"content", wire.now_s)
    else:
        fresh = made(A, B)
        fresh.knock(wire.now_s)
        payload = fresh.outgoing.popleft()
    altered = bytearray(payload)
    altered[bit // 8 % len(payload)] ^= 1 << bit % 8
    with pytest.raises(BadSeal):
        wire.b.take(bytes(altered), wire.now_s)
    send(wire, wire.a, b"x")
    assert wire.got == [(wire.b, CONTROL, b"x")]


@given(junk=st.binary(max_size=300))
def test_no_invented_payload_is_taken(junk):
    wire = Wire().connect()
    with pytest.raises(BadSeal):
        wire.b.take(junk, wire.now_s)


def test_a_payload_sent_back_to_its_maker_is_refused():
    wire = Wire().connect()
    with pytest.raises(BadSeal):
        wire.a.take(wire.a.carry(CONTROL, b"x", wire.now_s), wire.now_s)


def test_a_storm_of_hellos_costs_no_more_than_its_allowance():
    wire = Wire().connect()
    fresh = made(A, B)
    fresh.knock(wire.now_s)
    hello = fresh.outgoing.popleft()
    for _ in range(20):
        with contextlib.suppress(BadSeal):
            wire.b.take(hello, wire.now_s)
    with pytest.raises(BadSeal, match="hellos a second"):
        wire.b.take(hello, wire.now_s)
    assert len(wire.b.outgoing) <= 16


def test_the_round_trip_is_measured_and_the_silence_known():
    wire = Wire().connect()
    wire.run(2.0)
    assert wire.a.rtt_s == 0.0
    assert wire.a.silence_s(wire.now_s + 3.0) == pytest.approx(3.25)
    assert made(A, B).silence_s(0.0) == float("inf")
    wire.a.excuse(2.0)
    assert wire.a.silence_s(wire.now_s + 3.0) == pytest.approx(1.25)


def test_bulk_waits_for_confirmation_and_goes_on_after_it():
    wire = Wire().connect()
    frame, sent = bytes(256 * 1024), 0
    held: list[bytes] = []
    while (payload := wire.a.carry(BULK, frame, wire.now_s)) is not None:
        held.append(payload)
        sent += len(frame)
    assert sent == forward.WINDOW_BYTES
    assert wire.a.carry(CONTROL, b"goes on", wire.now_s) is not None
    for payload in held:
        wire.deliver(wire.b, payload)
    wire.settle()
    assert wire.a.carry(BULK, frame, wire.now_s) is not None


def test_bulk_that_was_lost_stops_counting_after_a_while():
    window = CreditWindow()
    while window.room(0.0):
        window.send(256 * 1024, 0.0)
    assert not window.room(forward.WINDOW_STALL_S - 0.1)
    assert window.room(forward.WINDOW_STALL_S)


@given(position=st.integers(0, 2**64 - 1))
def test_a_partner_that_confirms_what_was_never_sent_gains_nothing(position):
    window = CreditWindow()
    while window.room(0.0):
        window.send(256 * 1024, 0.0)
    window.heard(position, 1.0)
    assert window.acked <= window.sent
    assert window.room(1.0) == (0 < position <= window.sent)


def test_a_meter_gives_each_sender_its_rate_and_all_together_four_times_it():
    meter = Meter(100.0)
    assert meter.take("a", 100, 0.0)
    assert not meter.take("a", 1, 0.0)
    assert meter.take("a", 50, 0.5)
    assert not meter.take("a", 1, 0.5)
    fresh = Meter(100.0)
    assert [fresh.take(name, 100, 10.0) for name in "abcde"] == [True] * 4 + [False]


def test_a_refused_amount_is_not_charged_and_time_going_back_gives_nothing():
    meter = Meter(100.0)
    assert not meter.take("a", 101, 10.0)
    assert meter.take("a", 100, 10.0)
    assert not meter.take("a", 1, 5.0)


def test_a_meter_remembers_a_bounded_number_of_senders():
    meter = Meter(1e9)
    for number in range(3 * forward.MAX_SENDERS):
        meter.take(str(number), 1, 0.0)
    assert len(meter) == forward.MAX_SENDERS


def test_addresses_round_trip_and_wrong_lengths_are_refused():
    assert unpack_forward(pack_forward(b"", A.peer, b"payload")) == (A.peer, b"payload")
    for size in (0, 32, forward.MAX_FORWARD_BYTES + 1):
        with pytest.raises(BadSeal):
            unpack_forward(bytes(size))


def test_the_longest_frame_fits():
    wire = Wire().connect()
    payload = wire.a.carry(BULK, bytes(MAX_FRAME_BYTES), wire.now_s)
    assert len(pack_forward(b"", B.peer, payload)) == forward.MAX_FORWARD_BYTES
    assert not is_hello(payload)
