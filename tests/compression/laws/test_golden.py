"""Golden files: payloads and values that may change only together with the protocol's version."""

import pytest
import torch
from worlds.codecs import decoded, encoded

from farflock.compression.catalog import CODECS, codec

pytestmark = pytest.mark.usefixtures("version")

NAMES = [
    *CODECS,
    "int8:4",
    "int4:6",
    "topk:4/64",
    "topk:5/1000",
    "fp4:4",
    "sign:12",
    "topk2:4/64",
    "topk2:5/1000",
    "ecsq:150",
]
CASES = [
    ("usual", 0),
    ("usual", 1),
    ("usual", 150),
    ("half", 67),
    ("any", 67),
    ("ties", 130),
    ("largest", 3),
    ("tiny", 33),
]


def as_hex(x):
    return x.numpy().tobytes().hex()


def from_hex(text):
    return (
        torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32) if text else torch.empty(0)
    )


def case(name, x):
    payload = encoded(codec(name), x)
    return {"payload": payload.hex(), "values": as_hex(decoded(codec(name), payload, len(x)))}


@pytest.fixture
def record(golden, values):
    """The golden file: the input values of every case, and each codec's payload and decoded
    values."""
    inputs = [values(kind, count, seed=7) for kind, count in CASES]
    now = {
        "inputs": [as_hex(x) for x in inputs],
        "codecs": {name: [case(name, x) for x in inputs] for name in NAMES},
    }
    return golden("codecs", now)


def test_every_payload_decodes_to_the_recorded_bits(record):
    assert list(record["codecs"]) == NAMES
    for name, cases in record["codecs"].items():
        for given, expected in zip(record["inputs"], cases, strict=True):
            payload = bytes.fromhex(expected["payload"])
            assert (
                as_hex(decoded(codec(name), payload, len(from_hex(given)))) == expected["values"]
            ), name


def test_every_tensor_encodes_to_the_recorded_bytes(record):
    for name, cases in record["codecs"].items():
        if name.endswith("+zstd"):
            continue  # two versions of zstd may write different bytes
        for given, expected in zip(record["inputs"], cases, strict=True):
            assert encoded(codec(name), from_hex(given)).hex() == expected["payload"], name
