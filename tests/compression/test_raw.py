"""Tests specific to fp32: every finite bit pattern survives, every other one is refused."""

import pytest
import torch

from farflock.compression.codec import Context, CorruptPayload
from farflock.compression.floats import Raw

pytestmark = pytest.mark.usefixtures("version")


def test_every_finite_bit_survives(values, bits, kinds):
    for kind in kinds:
        x, payload = values(kind, 3001), bytearray()
        Raw().encode(x, Context(), payload)
        assert bytes(payload) == x.numpy().tobytes()
        back = torch.empty(3001)
        Raw().decode(payload, Context(), back)
        assert torch.equal(bits(back), bits(x))


@pytest.mark.parametrize("bad", ["0000807f", "000080ff", "0000c07f", "010080ff", "ffffff7f"])
def test_nan_and_infinity_are_refused_and_nothing_is_written(bad):
    out = torch.ones(3)
    with pytest.raises(CorruptPayload, match="NaN or infinity"):
        Raw().decode(bytes(4) + bytes.fromhex(bad) + bytes(4), Context(), out)
    assert out.tolist() == [1, 1, 1]
