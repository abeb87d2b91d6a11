"""Tests specific to Hadamard tiles: the rotation is that of the dense matrix, exact there and back,
and it tames large channels."""

import functools
import hashlib
import math
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds.codecs import decoded, encoded
from worlds.waiting import completed

from farflock.compression.catalog import codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor
from farflock.compression.hadamard import Hadamard, butterflies, signs

pytestmark = pytest.mark.usefixtures("version")
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CODECS = [Hadamard(4), Hadamard(8), Hadamard(4, 2), Hadamard(8, 8), Hadamard(4, 1024)]
KINDS = (
    "usual",
    "any",
    "huge",
    "denormal",
    "tiny",
    "half",
    "ties",
    "rare",
    "zeros",
    "minus_zeros",
    "largest",
)
CTX = Context(run_seed=5)

each_codec = pytest.mark.parametrize("c", CODECS, ids=lambda c: c.name)


def payload_of(c, x, ctx=CTX):
    return bytes(encoded(c, x, ctx))


def values_of(c, payload, count):
    return decoded(c, payload, count, CTX)


@functools.cache
def dense(length):
    """Sylvester's matrix from its definition: an entry is -1 where its row and column share an odd
    number of set bits."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(length)] for i in range(length)]
    )


def tiles(x, c):
    """The tiles as float64, clamped as the docstring says, and their rotation by the dense
    matrix."""
    cut = x.double().clamp(-(2.0**100), 2.0**100)
    cut = torch.cat((cut, cut.new_zeros(-len(x) % c.tile))).view(-1, c.tile)
    return cut, (cut * signs(CTX.run_seed, c.tile).double()) @ dense(c.tile).double()


@pytest.mark.parametrize("length", [2, 4, 8, 32, 64, 256, 1024])
def test_butterflies_are_the_dense_matrix_and_twice_is_the_length_times_the_identity(length):
    x = torch.randint(-999, 1000, (5, length)).float()  # sums of whole numbers are exact
    assert torch.equal(butterflies(x), x @ dense(length))
    assert torch.equal(butterflies(butterflies(x)), length * x)
    assert torch.equal(dense(length) @ dense(length).T, length * torch.eye(length))
    assert butterflies(x[:0]).shape == (0, length)


def test_the_argument_of_butterflies_is_left_alone():
    x = torch.randn(3, 8)
    before = x.clone()
    butterflies(x)
    assert torch.equal(x, before)


def test_signs_are_the_bits_of_shake_and_differ_between_runs():
    stream = int.from_bytes(hashlib.shake_128(b"hadamard 7").digest(8), "little")
    assert signs(7, 64).tolist() == [-1.0 if stream >> place & 1 else 1.0 for place in range(64)]
    assert not torch.equal(signs(7, 64), signs(8, 64))
    assert torch.equal(signs(7, 4), signs(7, 64)[:4])


@each_codec
@few
@given(data=st.data())
def test_the_error_of_each_tile_is_within_the_stated_bound(values, c, data):
    count = data.draw(
        st.sampled_from([0, 1, c.tile - 1, c.tile, c.tile + 1, 3 * c.tile]) | st.integers(0, 300)
    )
    x = values(data.draw(st.sampled_from(KINDS)), count, data.draw(st.integers(0, 2**32 - 1)))
    back = values_of(c, payload_of(c, x), count)
    assert bool(back.isfinite().all())
    cut, rotated = tiles(x, c)
    whole = torch.cat((back.double(), cut.view(-1)[count:])).view(cut.shape)
    levels = 7 if c.bits == 4 else 127
    bound = rotated.abs().amax(dim=1) / (2 * levels) * (1 + 2.0**-12) + 2.0**-76
    assert bool(((whole - cut).norm(dim=1) <= bound).all())


@each_codec
def test_every_kind_of_values_is_within_it_too(values, kinds, c):
    assert set(KINDS) == set(kinds)
    for kind in KINDS:
        x = values(kind, 2 * c.tile + 1)
        cut, rotated = tiles(x, c)
        back = values_of(c, payload_of(c, x), len(x)).double()
        levels = 7 if c.bits == 4 else 127
        error = (back[: 2 * c.tile] - cut.view(-1)[: 2 * c.tile]).view(2, -1).norm(dim=1)
        assert bool(
            (
                error <= rotated[:2].abs().amax(dim=1) / (2 * levels) * (1 + 2.0**-12) + 2.0**-76
            ).all()
        ), kind


def test_a_large_channel_harms_its_neighbours_less_than_in_plain_blocks(values):
    x = values("usual", 64 * 400).view(-1, 64).clone()
    x[:, 9] *= 60
    x = x.reshape(-1)
    others = torch.arange(len(x)) % 64 != 9

    def error(c):
        return float((values_of(c, payload_of(c, x), len(x)) - x)[others].norm() / x[others].norm())

    assert error(Hadamard(4)) < 0.65 * error(codec("int4"))
    assert error(Hadamard(8)) < 0.65 * error(codec("int8:64"))


def test_the_decoder_is_the_dense_matrix_on_the_codes_of_int4(values):
    """A twin rotates the values of int4 back in float64; only float32 rounding differs."""
    x = values("usual", 64 * 50)
    payload = payload_of(Hadamard(4), x)
    codes = torch.empty(len(x))
    codec("int4").decode(payload, CTX, codes)
    expected = (codes.double().view(-1, 64) @ dense(64).double()) * signs(5, 64).double() / 64
    torch.testing.assert_close(
        values_of(Hadamard(4), payload, len(x)).double(),
        expected.view(-1),
        rtol=0,
        atol=2e-7 * float(x.abs().amax()),
    )


def read_by_the_page(payload, tile, bits, count):
    """docs/activation-format.md in plain Python, one tile after the other, with each sum rounded to
    float32 by numpy."""
    stream = int.from_bytes(hashlib.shake_128(b"hadamard 5").digest(-(-tile // 8)), "little")
    tiles, values = -(-count // tile), []
    for number in range(tiles):
        scale = np.float32(struct.unpack_from("<f", payload, 4 * number)[0])
        codes = payload[4 * tiles + number * tile * bits // 8 :][: tile * bits // 8]
        if bits == 8:
            y = [np.float32(code) * scale for code in np.frombuffer(codes, np.int8)]
        else:
            y = [np.float32(half - 8) * scale for byte in codes for half in (byte & 15, byte >> 4)]
        h = 1
        while h < tile:
            for i in range(tile):
                if not i & h:
                    y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]
            h *= 2
        values += [(-v if stream >> i & 1 else v) / np.float32(tile) for i, v in enumerate(y)]
    return torch.from_numpy(np.array(values[:count], np.float32))


@pytest.mark.parametrize("c", CODECS[:4], ids=lambda c: c.name)
def test_a_reader_written_from_the_page_gets_the_same_bits(values, c):
    for kind in ("usual", "any", "ties", "rare"):
        payload = payload_of(c, values(kind, 150))
        assert torch.equal(
            values_of(c, payload, 150), read_by_the_page(payload, c.tile, c.bits, 150)
        )


SCRIPT = """
import hashlib, torch
from farflock.compression.activation import ActivationContext
from farflock.compression.activation_catalog import activation_codec

found = []
for name in ("hadamard4", "hadamard8:256", "aqsgd4", "topk:3/10"):
    sender, receiver = activation_codec(name), activation_codec(name)
    for visit in range(3):
        bits = (torch.arange(7 * 333) * 2654435761 + visit * 99991) % 2**32
        x = ((bits - 2**31).float() * 2.0**-33).view(1, 7, 333)
        ctx, out = ActivationContext((1, 7, 333), samples=(5,)), bytearray()
        sender.encode(x, ctx, out)
        found.append(hashlib.sha256(out + receiver.decode(out, ctx).numpy().tobytes()).hexdigest())
print(found, torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.net
def test_bytes_and_values_are_equal_with_and_without_vector_instructions(version, processors):
    if version == "torch":
        pytest.skip("the script runs with what is there, once")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions that torch knows")
    said = []
    for level in ("default", "avx2"):
        command = [sys.executable, "-c", SCRIPT]
        done = completed(command, processors(level).run, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.rpartition(" "))
    assert [word for _, _, word in said] == ["DEFAULT\n", "AVX2\n"]
    assert said[0][0] == said[1][0]


@each_codec
def test_lengths_are_exact_and_every_other_is_refused(values, c):
    for count in (0, 1, c.tile, c.tile + 3):
        payload = payload_of(c, values("usual", count))
        assert len(payload) == c.max_bytes(count)
        for wrong in (payload[:-1], payload + b"\0", b"", bytes(9)):
            if len(wrong) != len(payload):
                with pytest.raises(CorruptPayload, match="needs"):
                    values_of(c, wrong, count)


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_sent(values, c, bad):
    x, out = values("usual", c.tile + 1), bytearray(b"before")
    x[c.tile] = bad
    with pytest.raises(UnencodableTensor, match="1 of"):
        c.encode(x, CTX, out)
    assert out == b"before"


@each_codec
@few
@given(data=st.data())
def test_any_bytes_of_the_right_length_are_finite_values_or_refused(values, c, data):
    count = data.draw(st.sampled_from([1, c.tile, c.tile + 1]))
    payload = bytearray(payload_of(c, values(data.draw(st.sampled_from(KINDS)), count)))
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = data.draw(st.binary(min_size=len(payload), max_size=len(payload)))
    out = torch.full((count,), 7.5)
    try:
        c.decode(payload, CTX, out)
    except CorruptPayload:
        assert torch.equal(out, torch.full((count,), 7.5))
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-92, 2.0**112, 2.0**120])
def test_a_scale_that_no_writer_makes_is_refused(scale):
    payload = struct.pack("<f", scale) + bytes([0x99] * 32)  # all codes 1
    with pytest.raises(CorruptPayload, match="outside its limits"):
        values_of(Hadamard(4), payload, 64)


def test_no_value_ever_passes_through_a_denormal(values):
    """So processors that flush denormals read the same bits. The cases are the smallest scale there
    is, and differences of neighbours."""
    scale = float(np.nextafter(np.float32(2.0**-84), np.float32(1)))
    for seed in range(20):
        codes = (values("any", 512, seed).view(torch.int32) % 15 - 7).to(torch.int8).numpy() + 8
        payload = (
            struct.pack("<f", scale) + (codes[::2] | codes[1::2] << 4).astype(np.uint8).tobytes()
        )
        usual = values_of(Hadamard(4, 512), payload, 512)
        torch.set_flush_denormal(True)
        try:
            flushed = values_of(Hadamard(4, 512), payload, 512)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(usual, flushed)
        assert float(usual[usual != 0].abs().amin()) > 2.0**-126


def test_encode_and_decode_are_pure(values, bits):
    x = values("usual", 200)
    before = x.clone()
    payload = payload_of(Hadamard(), x)
    assert torch.equal(x, before)
    assert payload_of(Hadamard(4), x.clone()) == payload
    assert torch.equal(
        bits(values_of(Hadamard(), payload, 200)),
        bits(values_of(Hadamard(), bytearray(payload), 200)),
    )


def test_another_run_rotates_otherwise(values):
    x = values("usual", 64)
    assert payload_of(Hadamard(8), x, Context(run_seed=1)) != payload_of(
        Hadamard(8), x, Context(run_seed=2)
    )


@pytest.mark.parametrize(("bits_", "tile"), [(4, 48), (4, 1), (8, 2048), (5, 64), (4, 0), (4, -4)])
def test_a_tile_that_is_not_possible_is_refused_with_the_choice(bits_, tile):
    with pytest.raises(ValueError, match="choose 4 or 8 bits and a power of two from 2 to 1024"):
        Hadamard(bits_, tile)


def test_names_lengths_and_granules():
    assert [c.name for c in CODECS] == [
        "hadamard4",
        "hadamard8",
        "hadamard4:2",
        "hadamard8:8",
        "hadamard4:1024",
    ]
    assert [c.granule((7, 9)) for c in CODECS] == [64, 64, 2, 8, 1024]
    assert Hadamard(4).max_bytes(65) == 2 * (4 + 32)
    assert math.isclose(8 * Hadamard(8).max_bytes(6400) / 6400, 8.5)
