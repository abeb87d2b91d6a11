"""Tests specific to int8: how tight its stated bound is, no drift of block means, and the code it
never writes."""

import pytest
import torch
from worlds.codecs import round_trip

from farflock.compression.codec import Context, CorruptPayload
from farflock.compression.int8 import Int8

pytestmark = pytest.mark.usefixtures("version")


def half_steps(values, block, top):
    """Blocks of values exactly half-way between two codes, where rounding errs most."""
    x = ((values("usual", block * 64).view(torch.int32) % (2 * top) - top).float() + 0.5).view(
        -1, block
    )
    x[:, 0] = top
    return (x * values("usual", 64, seed=1).abs()[:, None]).reshape(-1)


def test_absmax_over_254_alone_would_be_a_false_promise_and_the_stated_bound_is_not(values):
    x = half_steps(values, 256, 127)
    error = (round_trip(Int8(), x).double() - x.double()).abs().view(-1, 256).amax(dim=1)
    ratio = float((error / (x.view(-1, 256).abs().amax(dim=1).double() / 254)).max())
    assert 1 < ratio <= 1 + 2.0**-14


def test_the_mean_of_blocks_survives(values):
    x = values("usual", 256 * 400)
    drift = (round_trip(Int8(), x).double() - x.double()).view(400, 256).mean(dim=1)
    step = x.view(400, 256).abs().amax(dim=1).double() / 127
    # five standard deviations of 256 fair roundings
    assert float((drift / step).abs().max()) < 5 / (12 * 256) ** 0.5
    assert abs(float((drift / step).mean())) < 5 / (12 * 256 * 400) ** 0.5


def test_one_large_value_coarsens_its_own_block_only(values):
    x = values("usual", 1024)
    before = round_trip(Int8(), x)
    x[300] = 1e6
    after = round_trip(Int8(), x)
    assert float(after[300]) == pytest.approx(1e6)
    assert torch.equal(after[256:512].nonzero().flatten(), torch.tensor([44]))
    assert torch.equal(
        torch.cat((after[:256], after[512:])), torch.cat((before[:256], before[512:]))
    )


def test_decoding_a_decoded_tensor_changes_little(values):
    once = round_trip(Int8(), values("usual", 2560))
    step = once.view(-1, 256).abs().amax(dim=1, keepdim=True) / 127
    assert float(((round_trip(Int8(), once) - once).view(-1, 256).abs() / step).max()) < 1e-4


def test_the_code_minus_128_is_refused(values):
    payload = bytearray()
    Int8().encode(values("usual", 300), Context(), payload)
    payload[8 + 299] = 0x80
    with pytest.raises(CorruptPayload, match="code -128"):
        Int8().decode(payload, Context(), torch.empty(300))


def test_the_largest_floats_come_back_finite_and_nearly_whole():
    x = torch.tensor([3.4028235e38, -3.4028235e38, 1.7e38])
    assert torch.allclose(round_trip(Int8(), x), x, rtol=0.01)
    assert bool(torch.isfinite(round_trip(Int8(), x)).all())
