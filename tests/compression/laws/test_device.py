"""Law 7 of `Codec`: values may be on any device. The device is worlds/card.py, whose operators give
the CPU's bits, so every payload is the CPU's byte for byte; on another device those of low rank may
differ, as its products are rounded in another order there."""

import pytest
import torch
from worlds.card import CARD

from farflock.compression import check
from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor
from farflock.compression.hadamard import Hadamard

NAMES = [
    *CODECS,
    "int4:6",
    "fp4:6",
    "sign:7",
    "topk:5/4095",
    "topk2:3/10",
    "int8+zstd",
    "hadamard4",
]
KINDS = ("any", "ties", "zeros")
MATRIX = Context(columns=64)
COUNT = 64 * 200 + 64  # values: rows of 64, and a short last chunk

each_codec = pytest.mark.parametrize("name", NAMES)


def built(name):
    """A codec of the catalogue, or the one that only activations use."""
    return Hadamard() if name == "hadamard4" else codec(name)


def encoded(made, x):
    """The payload of values, and the bytes that left the card for it."""
    CARD.reset_counters()
    out = bytearray()
    assert made.encode(x, MATRIX, out) == len(out)
    return bytes(out), CARD.from_card_bytes


def decoded(made, payload, out):
    """The values of a payload, on the CPU."""
    made.decode(payload, MATRIX, out)
    return out.cpu().view(torch.int32)


@each_codec
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, COUNT])
def test_payloads_and_values_are_those_of_the_cpu(name, kind, count, accelerator):
    CARD.reciprocal = True  # as CUDA divides by a number
    made, x = built(name), check.example(kind, count)
    here, there = (encoded(made, values)[0] for values in (x, x.to(accelerator)))
    assert there == here
    out = torch.full((count,), check.UNTOUCHED, device=accelerator)
    assert torch.equal(
        decoded(made, here, out), decoded(made, here, torch.full((count,), check.UNTOUCHED))
    )
    assert out.device.type != "cpu"


@each_codec
def test_only_a_codec_that_works_on_the_device_spares_the_values_a_journey(name, card):
    made, x = built(name), check.example("usual", COUNT).to(card)
    payload, left = encoded(made, x)
    if not made.on_device:
        assert left == x.nbytes
        return
    inner = bytearray()
    getattr(made, "inner", made).encode(x.cpu(), MATRIX, inner)
    places = name.startswith("topk2") * (8 + 4) * COUNT // 10 * 3  # kept values and their places
    assert left <= len(inner) + max(places, 512)
    out = torch.empty(COUNT, device=card)
    CARD.reset_counters()
    made.decode(payload, MATRIX, out)
    assert CARD.to_card_bytes <= len(inner) + max(places, 512)


@each_codec
def test_what_is_refused_on_the_cpu_is_refused_there(name, accelerator):
    made, x = built(name), check.example("usual", 300)
    payload, _ = encoded(made, x.to(accelerator))
    out = torch.empty(300, device=accelerator)
    for wrong in (payload[:-1], payload + b"\0", b"\xff" * len(payload)):
        with pytest.raises(CorruptPayload):
            made.decode(wrong, MATRIX, out)
    x[7] = float("nan")
    with pytest.raises(UnencodableTensor, match="1 of 300"):
        encoded(made, x.to(accelerator))
