"""Moments in one byte a value: near to what was written, and the same again when written back."""

import pytest
import torch

from farflock.optimizers.parts.packed_moment import BLOCK, PackedMoment, codes_of

CPU = torch.device("cpu")
both = pytest.mark.parametrize("is_square", [False, True])


def spread(count, is_square):
    """Return values over nine decades, ascending within their noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, generator=generator) * torch.logspace(-6, 3, count)
    return x * x if is_square else x


def packed(x, is_square):
    moment = PackedMoment(x.shape, CPU, is_square)
    moment.write(0, x.reshape(-1))
    return moment


@both
def test_a_new_one_is_zero(is_square):
    moment = PackedMoment((3, 100), CPU, is_square)
    assert torch.equal(moment.whole(), torch.zeros(3, 100))
    moment.write(0, torch.zeros(300), turn=1)
    assert torch.equal(moment.whole(), torch.zeros(3, 100))
    assert moment.nbytes == 300 + 2 * 4


@both
def test_values_are_near_and_the_largest_of_a_block_is_exact(is_square):
    x = spread(1000, is_square)
    found = packed(x, is_square).whole()
    share = (found - x).abs() / x.abs()
    assert share.median() < 0.03
    assert share.quantile(0.9) < 0.12
    for block, values in zip(x.split(BLOCK), found.split(BLOCK), strict=True):
        top = block.abs().argmax()
        torch.testing.assert_close(values[top], block[top])
    assert torch.equal(found.sign(), x.sign())


@both
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_what_was_read_is_written_back_without_a_change(is_square, count):
    moment = packed(spread(count, is_square), is_square)
    before = moment.whole()
    for _ in range(3):
        moment.write(0, moment.whole())
        assert torch.equal(moment.whole(), before)
    moment.write(0, moment.whole(), turn=7)
    torch.testing.assert_close(moment.whole(), before, rtol=0, atol=1e-6 * float(before.max()))


@both
def test_parts_are_those_of_the_whole(is_square):
    x = spread(1000, is_square)
    moment = packed(x, is_square)
    whole = moment.whole()
    for start, stop in ((0, 1000), (0, 1), (255, 257), (256, 512), (700, 1000), (999, 1000)):
        assert torch.equal(moment.read(start, stop), whole[start:stop])
    apart = PackedMoment(x.shape, CPU, is_square)
    for start in (0, 256, 768):
        apart.write(start, x[start : {0: 256, 256: 768, 768: 1000}[start]])
    assert torch.equal(apart.whole(), whole)


@pytest.mark.parametrize(("start", "count"), [(1, 256), (0, 100)])
def test_half_blocks_are_not_written(start, count):
    with pytest.raises(AssertionError, match="whole blocks"):
        PackedMoment((1000,), CPU, False).write(start, torch.ones(count))


def test_no_root_above_zero_becomes_zero():
    x = torch.full((256,), 1e-30)
    x[0], x[1] = 1.0, 0.0
    for turn in (None, 0, 1, 12345):
        moment = PackedMoment((256,), CPU, True)
        moment.write(0, x, turn)
        assert torch.equal(moment.whole() > 0, x > 0)


@both
def test_over_turns_values_are_right_on_average(is_square):
    x = spread(512, is_square)
    moment, total = PackedMoment(x.shape, CPU, is_square), torch.zeros(512, dtype=torch.float64)
    for turn in range(400):
        moment.write(0, x, turn)
        total += moment.whole().double().abs().sqrt() if is_square else moment.whole().double()
    wanted = x.double().sqrt() if is_square else x.double()
    inside = wanted.abs() > 1e-5 * wanted.abs().max()
    assert ((total / 400 - wanted) / wanted)[inside].abs().quantile(0.95) < 3e-3


def test_a_moment_that_shrinks_a_little_each_step_comes_down():
    held = {}
    for turned in (False, True):
        moment = PackedMoment((512,), CPU, False)
        moment.write(0, torch.cat((torch.ones(256), torch.full((256,), 3e-4))))
        top = torch.zeros(512, dtype=torch.bool)
        top[255] = True  # the block's largest value stays
        for turn in range(400):
            x = moment.whole()
            x[:256] = torch.where(top[:256], 1.0, x[:256] * 0.99)
            moment.write(0, x, turn if turned else None)
        held[turned] = float(moment.whole()[:255].mean())
    assert held[True] == pytest.approx(0.99**400, rel=0.15)
    assert held[False] > 2 * held[True]


@pytest.mark.parametrize("signed", [False, True])
def test_codes_ascend_from_end_to_end(signed):
    codes = codes_of(signed)
    assert list(codes) == sorted(set(codes))
    assert (codes[0], codes[-1]) == (-1.0 if signed else 0.0, 1.0)
    assert len(codes) == (255 if signed else 256)
    assert 0.0 in codes
    assert min(code for code in codes if code > 0) < 1e-6


def test_it_is_packed_on_its_device_as_on_the_cpu(card):
    for is_square in (False, True):
        x = spread(1000, is_square)
        there = PackedMoment(x.shape, card, is_square)
        there.write(0, x.to(card), turn=3)
        here = PackedMoment(x.shape, CPU, is_square)
        here.write(0, x, turn=3)
        assert torch.equal(there.whole().cpu(), here.whole())
