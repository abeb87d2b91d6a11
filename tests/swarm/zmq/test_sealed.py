"""The sealed session against a carrier that may do anything to the bytes."""

import random

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.identity import Identity, public_key
from farflock.swarm.zmq.sealed import HELLO_BYTES, REORDER, SEAL_BYTES, BadSeal, Sealed, read_hello

A, B, RELAY = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))


def half(identity: Identity, partner: Identity, seed: int, run: str = "run") -> Sealed:
    ephemeral = X25519PrivateKey.from_private_bytes(random.Random(seed).randbytes(32))
    return Sealed(identity, partner.peer, run, ephemeral)


def agree(a: Sealed, b: Sealed) -> None:
    b.meet(a.hello())
    a.meet(b.hello())
    b.meet(a.hello())
    assert a.ready
    assert b.ready


def pair(seed: int = 0) -> tuple[Sealed, Sealed]:
    a, b = half(A, B, 2 * seed), half(B, A, 2 * seed + 1)
    agree(a, b)
    return a, b


def test_frames_pass_both_ways_and_do_not_show_their_content():
    a, b = pair()
    for sender, receiver, lane in ((a, b, 0), (b, a, 0), (a, b, 1), (b, a, 1)):
        sealed = sender.seal(b"attack at dawn", lane)
        assert b"attack" not in sealed
        assert len(sealed) == SEAL_BYTES + len(b"attack at dawn")
        assert receiver.open(sealed) == (lane, b"attack at dawn")


def test_two_hellos_that_cross_lead_to_the_same_keys():
    a, b = half(A, B, 1), half(B, A, 2)
    first_a, first_b = a.hello(), b.hello()
    assert not a.meet(first_b)
    assert not b.meet(first_a)
    second_a, second_b = a.hello(), b.hello()
    assert a.meet(second_b)
    assert b.meet(second_a)
    assert b.open(a.seal(b"x")) == (0, b"x")
    assert a.open(b.seal(b"y")) == (0, b"y")


def test_each_session_each_direction_and_each_lane_encrypts_differently():
    a, b = pair()
    c, d = pair(seed=1)
    frames = [s.seal(b"same", lane) for s in (a, b, c, d) for lane in (0, 1)]
    assert len({frame[9:] for frame in frames}) == len(frames)


@given(data=st.binary(max_size=300), cut=st.integers(0, 324))
def test_no_truncated_frame_opens(data, cut):
    a, b = pair()
    sealed = a.seal(data)
    if cut < len(sealed):
        with pytest.raises(BadSeal):
            b.open(sealed[:cut])
    assert b.open(sealed) == (0, data)


@given(data=st.binary(max_size=64), bit=st.integers(min_value=0))
def test_no_frame_with_a_flipped_bit_opens_and_the_true_one_still_does(data, bit):
    a, b = pair()
    sealed = a.seal(data)
    altered = bytearray(sealed)
    altered[bit // 8 % len(sealed)] ^= 1 << bit % 8
    with pytest.raises(BadSeal):
        b.open(bytes(altered))
    assert b.open(sealed) == (0, data)


@given(junk=st.binary(max_size=400))
def test_no_invented_bytes_open_or_pass_for_a_hello(junk):
    a, _b = pair()
    with pytest.raises(BadSeal):
        a.open(junk)
    with pytest.raises(BadSeal):
        half(A, B, 7).meet(junk)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 199)), max_size=300))
def test_whatever_the_order_and_repetition_each_frame_opens_at_most_once(deliveries):
    a, b = pair()
    frames = {
        (lane, number): a.seal(b"%d" % number, lane) for lane in (0, 1) for number in range(200)
    }
    opened: list[tuple[int, int]] = []
    newest = [-1, -1]
    for lane, number in deliveries:
        expected = (lane, number) not in opened and number > newest[lane] - REORDER
        try:
            assert b.open(frames[lane, number]) == (lane, b"%d" % number)
        except BadSeal:
            assert not expected
        else:
            assert expected
            opened.append((lane, number))
            newest[lane] = max(newest[lane], number)
    assert len(set(opened)) == len(opened)


def test_a_frame_that_is_too_far_behind_is_refused():
    a, b = pair()
    frames = [a.seal(bytes([number])) for number in range(REORDER + 1)]
    b.open(frames[REORDER])
    assert b.open(frames[1]) == (0, b"\x01")
    with pytest.raises(BadSeal, match="too old"):
        b.open(frames[0])


def test_a_frame_sent_back_to_its_maker_is_refused():
    a, _b = pair()
    with pytest.raises(BadSeal):
        a.open(a.seal(b"x"))


def test_a_frame_moved_to_the_other_lane_is_refused():
    a, b = pair()
    sealed = bytearray(a.seal(b"x", 0))
    sealed[0] = 1
    with pytest.raises(BadSeal):
        b.open(bytes(sealed))


def test_a_frame_of_another_session_of_the_same_two_is_refused():
    a, _ = pair(seed=1)
    _, b = pair(seed=2)
    with pytest.raises(BadSeal):
        b.open(a.seal(b"x"))


def test_the_relays_own_hello_in_the_partners_place_is_refused():
    with pytest.raises(BadSeal, match="not a hello of"):
        half(A, B, 1).meet(half(RELAY, A, 2).hello())


def test_the_partners_hello_to_another_peer_is_refused():
    with pytest.raises(BadSeal, match="not a hello of"):
        half(A, B, 1).meet(half(B, RELAY, 2).hello())


def test_a_hello_sent_back_to_its_maker_is_refused():
    a = half(A, B, 1)
    with pytest.raises(BadSeal, match="not a hello of"):
        a.meet(a.hello())


def test_a_hello_with_a_swapped_ephemeral_key_is_refused():
    hello = bytearray(half(B, A, 1).hello())
    hello[64:96] = half(RELAY, A, 2).mine
    with pytest.raises(BadSeal, match="did not sign"):
        half(A, B, 3).meet(bytes(hello))


def test_a_hello_of_another_run_is_refused():
    with pytest.raises(BadSeal, match="did not sign"):
        half(A, B, 1).meet(half(B, A, 2, run="other").hello())


def test_an_old_hello_agrees_on_nothing_and_the_true_one_still_works():
    a, b = half(A, B, 1), half(B, A, 2)
    agree(a, b)
    old = b.hello()
    again = half(A, B, 3)
    assert not again.meet(old)
    assert not again.ready
    new = half(B, A, 4)
    agree(again, new)
    with pytest.raises(BadSeal):
        again.open(b.seal(b"of the old session"))
    assert again.open(new.seal(b"x")) == (0, b"x")


def test_a_keyed_session_refuses_another_hello_and_keeps_its_keys():
    a, b = pair()
    with pytest.raises(BadSeal, match="another session"):
        a.meet(half(B, A, 9).hello())
    assert a.meet(b.hello())
    assert b.open(a.seal(b"x")) == (0, b"x")


def test_an_ephemeral_key_of_low_order_is_refused():
    a = half(A, B, 1)
    text = B.public + A.public + bytes(32) + a.mine
    with pytest.raises(BadSeal, match="low order"):
        a.meet(text + B.sign(b"sealed-hello", b"\x00\x03run" + text))
    assert not a.ready


def test_a_hello_names_both_and_what_was_heard():
    a = half(A, B, 1)
    hello = a.hello()
    assert len(hello) == HELLO_BYTES
    assert hello[:64] == public_key(A.peer) + public_key(B.peer)
    assert read_hello(hello, B.peer, A.peer, "run") == (a.mine, bytes(32))


def test_sealing_before_the_hellos_is_a_fault_of_ours():
    with pytest.raises(AssertionError):
        half(A, B, 1).seal(b"x")
