"""Arithmetic in place has the bits of the same operations on fresh tensors, one torch call each, by
torch in blocks and by the compiled kernel with every instruction set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression import elementwise, native

KERNELS = (None, *native.kernels())
SPECIAL = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000]  # zeros, denormals
SPECIAL += [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x7FC00000]

each_kernel = pytest.mark.parametrize(
    "kernel", KERNELS, ids=lambda kernel: kernel.instructions if kernel else "torch"
)
factors = st.sampled_from([0.7, 0.9, 1.0, 0.0, -0.3, 1e-30, 3e38, 1 / 3]) | st.floats(
    -10, 10, allow_subnormal=False
)
patterns = st.one_of(
    st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1), st.integers(0x3F000000, 0x40000000)
)


@st.composite
def tensors(draw, number):
    """Flat tensors of one length, each at a start of its own that need not be aligned."""
    count = draw(st.integers(0, 70))
    return [unaligned(draw, count) for _ in range(number)]


def unaligned(draw, count):
    bits = draw(st.lists(patterns, min_size=count, max_size=count))
    start = draw(st.integers(0, 9))
    signed = [0] * start + [number - (number >> 31 << 32) for number in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)[start:]


def rounded(factor):
    return torch.tensor(factor, dtype=torch.float32)


def stepped(phi, delta, momentum, lr, mu):
    """The outer step as its equations say it, on fresh tensors."""
    u = momentum * rounded(mu) + delta
    return phi - (delta + u * rounded(mu)) * rounded(lr), u


def same(one, other):
    """True if all bits are equal, except that a NaN may have any."""
    equal = one.view(torch.int32) == other.view(torch.int32)
    return bool((equal | (one.isnan() & other.isnan())).all())


@each_kernel
@given(tensors(3), factors, factors)
def test_an_outer_step_has_the_bits_of_its_equations(kernel, three, lr, mu):
    phi, delta, momentum = three
    before = delta.clone()
    after, u = stepped(phi, delta, momentum, lr, mu)
    with native.using(kernel):
        elementwise.nesterov_(phi, delta, momentum, lr, mu)
    assert same(phi, after)
    assert same(momentum, u)
    assert same(delta, before)


@each_kernel
@given(tensors(3), st.lists(factors, min_size=3, max_size=3))
def test_a_weighted_mean_has_the_bits_of_products_added_in_order(kernel, three, weights):
    mean = three[0] * rounded(weights[0])
    for x, weight in zip(three[1:], weights[1:], strict=True):
        mean = mean + x * rounded(weight)
    total = torch.full_like(mean, 7.5)
    with native.using(kernel):
        elementwise.scaled_into(three[0], weights[0], total)
        for x, weight in zip(three[1:], weights[1:], strict=True):
            elementwise.add_scaled_(total, x, weight)
    assert same(total, mean)


@each_kernel
@given(tensors(2), factors)
def test_a_negative_weight_subtracts_with_the_same_bits(kernel, two, weight):
    total, x = two
    expected = total - x * rounded(weight)
    with native.using(kernel):
        elementwise.add_scaled_(total, x, -weight)
    assert same(total, expected)


@each_kernel
@given(tensors(3), st.sampled_from([None, 0, 1]))
def test_a_difference_has_the_bits_of_a_fresh_one_and_may_replace_either(kernel, three, replaced):
    a, b, out = three
    expected = a - b
    out = out if replaced is None else three[replaced]
    with native.using(kernel):
        elementwise.subtract_into(a, b, out)
    assert same(out, expected)


@each_kernel
def test_a_tensor_of_several_blocks_is_changed_to_its_end_and_not_beyond(kernel, values):
    count = 2 * elementwise.BLOCK + 13
    held = [values("any", count + 2, seed) for seed in range(3)]
    phi, delta, momentum = (x[1:-1] for x in held)
    edges = [(float(x[0]), float(x[-1])) for x in held]
    after, u = stepped(phi, delta, momentum, 0.7, 0.9)
    with native.using(kernel):
        elementwise.nesterov_(phi, delta, momentum, 0.7, 0.9)
        assert same(phi, after)
        assert same(momentum, u)
        expected = phi + delta * rounded(0.3)
        elementwise.add_scaled_(phi, delta, 0.3)
    assert same(phi, expected)
    assert [(float(x[0]), float(x[-1])) for x in held] == edges


@each_kernel
def test_tensors_of_any_shape_are_taken_as_long_as_they_are_alike(kernel, values):
    phi, delta = values("usual", 60, 1).view(3, 4, 5), values("usual", 60, 2).view(3, 4, 5)
    expected = phi - delta
    with native.using(kernel):
        elementwise.subtract_into(phi, delta, phi)
        elementwise.add_scaled_(phi, delta.clone(), 0.0)
    assert torch.equal(phi, expected)


@each_kernel
@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(6).double(),
        torch.zeros(12)[::2],
        torch.zeros(2, 3).bfloat16(),
    ],
    ids=["shape", "float64", "strided", "bfloat16"],
)
def test_tensors_that_are_not_alike_are_refused_and_stay_as_they_are(kernel, other):
    x = torch.ones(6)
    with native.using(kernel):
        for call in (
            lambda: elementwise.nesterov_(x, x.clone(), other, 0.7, 0.9),
            lambda: elementwise.nesterov_(x, other, x.clone(), 0.7, 0.9),
            lambda: elementwise.scaled_into(other, 2.0, x),
            lambda: elementwise.add_scaled_(x, other, 2.0),
            lambda: elementwise.subtract_into(x, other, x),
        ):
            with pytest.raises(ValueError, match="contiguous float32 tensors of one shape"):
                call()
    assert torch.equal(x, torch.ones(6))
