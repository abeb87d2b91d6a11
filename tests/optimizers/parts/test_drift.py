"""Sketches of parameters: the distances that they estimate, signs that come from the round, and
which peers are found to have drifted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.optimizers.parts.drift import SUMS, parted, sketch
from farflock.optimizers.parts.philox import words

SHAPES = {"w": (40, 33), "v": (7,), "empty": (0,)}


def tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def slow(held, round_number):
    """The sketch value by value, as its docstring says: sum i takes every 64th value from the i-th
    on, each with a bit of its own."""
    sums = np.zeros(SUMS)
    for place, x in enumerate(held.values()):
        drawn = words(0x64726966, place, round_number, 2 * -(-x.numel() // SUMS)).tolist()
        for at, value in enumerate(x.reshape(-1).tolist()):
            negative = drawn[at // 32] >> at % 32 & 1
            sums[at % SUMS] += -value if negative else value
    return sums


@pytest.mark.parametrize("round_number", [0, 49, 2**40])
def test_a_sketch_is_what_its_slow_twin_sums(round_number):
    held = tensors(1)
    assert sketch(held, round_number).double().numpy() == pytest.approx(
        slow(held, round_number), rel=1e-5, abs=1e-5
    )


def test_a_tensor_that_is_summed_in_parts_gives_the_same(monkeypatch):
    whole = sketch(tensors(2), 3)
    monkeypatch.setattr("farflock.optimizers.parts.drift._ROWS", 5)
    assert torch.allclose(sketch(tensors(2), 3), whole, rtol=1e-6, atol=1e-6)


def test_a_sketch_has_the_size_of_what_it_is_of_in_the_mean_over_rounds():
    held = tensors(4, scale=0.1)
    size = sum(float(x.double().square().sum()) for x in held.values())
    squares = [float(sketch(held, number).double().square().sum()) for number in range(200)]
    assert np.mean(squares) == pytest.approx(size, rel=0.05)
    assert np.std(squares) < 0.3 * size
    assert len(set(squares)) == 200  # other rounds, other signs


def test_a_change_of_any_one_value_shows():
    for place in (0, 63, 64, 1319):
        held = {name: x.clone() for name, x in tensors(5).items()}
        held["w"].view(-1)[place] += 1.0
        assert float((sketch(held, 7) - sketch(tensors(5), 7)).norm()) == pytest.approx(
            1.0, rel=1e-4
        )


def moved(share):
    """A sketch of the parameters after all but a few of them moved by this share of their size."""
    held, other = tensors(6), tensors(7)
    size = [sum(float(x.square().sum()) for x in one.values()) ** 0.5 for one in (held, other)]
    return sketch(
        {name: x + other[name] * (share * size[0] / size[1]) for name, x in held.items()}, 9
    )


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_the_distance_is_that_of_the_parameters(share):
    assert parted(moved(share), [moved(0.0), moved(0.0), moved(share)]) == pytest.approx(
        share, rel=0.35
    )
    assert parted(moved(0.0), [moved(0.0), moved(0.0), moved(share)]) == 0.0


def test_of_two_the_second_gives_way():
    assert parted(moved(0.0), [moved(0.0), moved(0.1)]) == 0.0
    assert parted(moved(0.1), [moved(0.0), moved(0.1)]) > 0.05
    assert parted(moved(0.3), [moved(0.3)]) == 0.0


def test_without_any_parameters_there_is_no_distance():
    nothing = torch.zeros(SUMS)
    assert parted(nothing, [nothing, nothing]) == 0.0
    assert parted(nothing + 1, [nothing, nothing, nothing + 1]) == float("inf")


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
    st.randoms(),
)
def test_a_minority_cannot_move_the_majority(liars, lies, chance):
    honest, members = moved(0.0), liars + 1
    sketches = [honest + 1e-6 * number for number in range(members)] + [
        torch.full((SUMS,), lie) for lie in lies[:liars]
    ]
    chance.shuffle(sketches)
    assert parted(honest, sketches) < 1e-5
