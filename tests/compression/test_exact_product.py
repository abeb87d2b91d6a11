"""Products whose sums are exact: compared with rational arithmetic, and with the same bits in any
order of summation."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.exact_product import MAX_INNER, product


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rational(left, right):
    """A slow twin in rational numbers."""
    columns = list(zip(*right.tolist(), strict=True))
    return [
        [
            sum((Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True)), Fraction())
            for column in columns
        ]
        for row in left.tolist()
    ]


def off(found, exact):
    rows = zip(found.tolist(), exact, strict=True)
    return max(abs(Fraction(x) - y) for row, line in rows for x, y in zip(row, line, strict=True))


@pytest.mark.parametrize(("slices", "within"), [(1, 2.0**-18), (2, 2.0**-40), (3, 2.0**-47)])
@pytest.mark.parametrize("inner", [1, 7, 64])
def test_it_is_the_product_within_what_its_slices_hold(inner, slices, within):
    left, right = normal(5, inner), normal(inner, 3, seed=1)
    largest = float(left.abs().amax() * right.abs().amax())
    assert off(product(left, right, slices), rational(left, right)) <= within * inner * largest


def test_in_any_order_the_bits_are_the_same_as_those_of_ordinary_products_are_not():
    left, right = normal(40, 1000), normal(1000, 30, seed=1)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(product(left, right), product(left[:, order], right[order]))
    halves = product(left[:17], right), product(left[17:], right)
    ordinary = left @ right
    assert not torch.equal(ordinary, left[:, order] @ right[order])
    torch.testing.assert_close(product(left, right), ordinary, rtol=0, atol=1e-12)
    assert halves[0].shape == (17, 30)


@given(
    st.integers(1, 6),
    st.integers(0, 2**20),
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=12, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_any_numbers_in_any_order_of_rows_of_any_size(inner, seed, values):
    left = (
        torch.tensor(values, dtype=torch.float64).view(-1, inner)
        if 12 % inner == 0
        else torch.ones(2, inner)
    )
    right = normal(inner, 2, seed=seed)
    order = torch.randperm(inner, generator=torch.Generator().manual_seed(seed))
    found = product(left, right)
    assert torch.equal(found, product(left[:, order], right[order]))
    assert off(found, rational(left, right)) <= 2.0**-44 * inner * float(
        left.abs().amax() * right.abs().amax()
    )


def test_zeros_tiny_numbers_and_no_rows():
    assert not product(torch.zeros(2, 3), normal(3, 2)).any()
    assert product(torch.empty(0, 3), normal(3, 2)).shape == (0, 2)
    assert not product(torch.full((1, 1), 1e-300, dtype=torch.float64), normal(1, 1)).any(), (
        "below what is told apart"
    )
    small = torch.full((1, 1), 1e-30)
    torch.testing.assert_close(
        product(small, small), (small.double() * small.double()), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="NaN or infinity"):
        product(torch.full((1, 1), value), torch.ones(1, 1))


@pytest.mark.parametrize("inner", [0, MAX_INNER + 1])
def test_too_many_sums_are_refused(inner):
    with pytest.raises(ValueError, match=f"products over {inner} values"):
        product(torch.ones(1, inner), torch.ones(inner, 1))
