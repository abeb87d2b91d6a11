"""The shared parts: bytes in and out, and the one-pass check, which must find what isfinite
finds."""

import pytest
import torch

from farflock.compression.codec import UnencodableTensor
from farflock.compression.payload import FLOAT_MAX, append, largest, values_at, within

pytestmark = pytest.mark.usefixtures("version")


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 32, 33, 1000, 70_001])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_wherever_it_is(values, count, bad):
    for at in {0, 1 % count, count // 2, count - 1}:
        x = values("any", count)
        x[at] = bad
        assert not largest(x) <= FLOAT_MAX
        with pytest.raises(UnencodableTensor):
            within(x)


def test_finite_values_pass_as_they_are_without_a_copy(values):
    for kind in ("usual", "any", "largest", "denormal"):
        x = values(kind, 1000)
        assert within(x) is x
        assert largest(x) == float(x.abs().max())
    assert largest(torch.empty(0)) == 0


def test_what_exceeds_a_limit_is_cut_in_a_copy():
    x = torch.tensor([1.0, -5.0, 7.0])
    assert within(x, 4.0).tolist() == [1.0, -4.0, 4.0]
    assert x.tolist() == [1.0, -5.0, 7.0]


def test_values_read_from_a_payload_are_a_copy_at_any_offset():
    payload = bytearray(b"\x00" * 3)
    assert append(payload, torch.tensor([1.5, -2.5])) == 8
    assert append(payload, torch.empty(0)) == 0
    read = values_at(payload, 3, 2, torch.float32)
    payload[3:] = bytes(8)
    assert read.tolist() == [1.5, -2.5]


def test_strided_tensors_are_written_in_order():
    payload = bytearray()
    append(payload, torch.arange(6, dtype=torch.uint8)[::2])
    assert payload == bytes([0, 2, 4])
