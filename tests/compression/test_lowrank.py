"""Tests specific to low rank: matrices of few directions arrive, the best directions are found, and
other tensors are bf16."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.codecs import decoded, encoded

from farflock.compression.catalog import codec
from farflock.compression.codec import Context, CorruptPayload
from farflock.compression.lowrank import LowRank, fitted, leading
from farflock.node.train.shards import ShardLayout


def payload_of(c, x, columns):
    return encoded(c, x.reshape(-1), Context(columns=columns))


def values_of(c, payload, rows, columns):
    return decoded(c, payload, rows * columns, Context(columns=columns)).view(rows, columns)


def returned(c, x):
    """Return a matrix after a round trip."""
    return values_of(c, payload_of(c, x, x.shape[1]), *x.shape)


def normal(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(x, y):
    return float((x - y).double().norm() / x.double().norm())


@pytest.mark.parametrize("true_rank", [1, 3, 5])
def test_before_rounding_a_matrix_of_no_higher_rank_is_lossless(true_rank):
    """specs of PowerSGD and DiLoCoX: to 1e-5."""
    x = normal(60, true_rank) @ normal(true_rank, 90, seed=1)
    left = leading(x, 5)
    torch.testing.assert_close(left.T @ left, torch.eye(5), atol=1e-5, rtol=0)
    assert error(x, left @ fitted(x, left).T) < 1e-5


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (7, 400)])
def test_a_matrix_of_no_higher_rank_arrives_within_what_eight_bits_round(shape):
    x = normal(shape[0], 3) @ normal(3, shape[1], seed=1)
    assert error(x, returned(LowRank(3), x)) < 0.02


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_the_error_is_near_that_of_the_best_directions(rank):
    """By Eckart and Young, no sum of `rank` products comes closer than that of the largest singular
    values."""
    x = normal(80, 120) * torch.arange(1, 121) ** -0.7
    singular = torch.linalg.svdvals(x.double())
    least = float(singular[rank:].norm() / singular.norm())
    assert least <= error(x, returned(LowRank(rank), x)) < 1.03 * least


@given(
    st.integers(1, 40),
    st.integers(2, 40),
    st.integers(1, 9),
    st.sampled_from([1e-45, 1e-38, 1e-30, 1.0, 1e25, 3e38]),
    st.integers(0, 5),
)
def test_no_matrix_becomes_larger_or_infinite(rows, columns, rank, size, seed):
    x = (normal(rows, columns, seed) * size).clamp(-3.4e38, 3.4e38)
    back = returned(LowRank(rank), x)
    assert bool(torch.isfinite(back).all())
    cut = (
        x.clamp(-(2.0**100), 2.0**100)
        if len(payload_of(LowRank(rank), x, columns)) < 2 * x.numel()
        else x
    )
    assert (
        float((back - cut).double().norm())
        <= 1.01 * float(cut.double().norm()) + x.numel() * 2.0**-86
    )


def test_zeros_are_zeros():
    assert not returned(LowRank(), torch.zeros(50, 50)).any()


def test_sending_the_residual_again_and_again_reaches_every_value():
    x, sent = normal(30, 50), torch.zeros(30, 50)
    for _ in range(60):
        sent += returned(LowRank(), x - sent)
    assert error(x, sent) < 0.01


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 5), (50, 0)])
def test_what_is_no_matrix_or_a_small_one_is_sent_as_bf16(rows, columns):
    x = normal(rows, max(columns, 1)).reshape(-1)
    assert payload_of(LowRank(), x, columns) == payload_of(codec("bf16"), x, 0)


def test_what_is_no_whole_number_of_rows_is_sent_as_bf16():
    x = normal(1, 5001).reshape(-1)
    assert payload_of(LowRank(), x, 50) == payload_of(codec("bf16"), x, 0)


def test_a_payload_is_as_long_as_the_page_says():
    assert len(payload_of(LowRank(4), normal(96, 256), 256)) == 4 * (96 + 256 + 4)
    # there are no more directions
    assert len(payload_of(LowRank(9), normal(3, 500), 500)) == 3 * (3 + 500 + 4)
    assert len(payload_of(LowRank(2), normal(3, 500), 500)) == 2 * (3 + 500 + 4)


def test_a_payload_made_by_hand_is_read():
    left, right = np.array([[1, -2, 0, 3], [0, 1, 0, 0]]), np.arange(2 * 9).reshape(2, 9) - 9
    payload = (
        struct.pack("<ff", 0.5, 2.0)
        + left.astype(np.int8).tobytes()
        + right.astype(np.int8).tobytes()
    )
    expected = 0.5 * np.outer(left[0], right[0]) + 2.0 * np.outer(left[1], right[1])
    assert values_of(LowRank(2), payload, 4, 9).tolist() == expected.tolist()


GOOD = struct.pack("<ff", 0.5, 2.0) + bytes(2 * (4 + 9))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\0",
        bytes(72),
        struct.pack("<ff", float("nan"), 1.0) + GOOD[8:],
        struct.pack("<ff", float("inf"), 1.0) + GOOD[8:],
        struct.pack("<ff", -1.0, 1.0) + GOOD[8:],
        struct.pack("<ff", 1e-38, 1.0) + GOOD[8:],
        struct.pack("<ff", 1e31, 1.0) + GOOD[8:],
        GOOD[:-1] + b"\x80",
    ],
)
def test_hostile_payloads_are_refused(payload):
    with pytest.raises(CorruptPayload):
        values_of(LowRank(2), payload, 4, 9)


@given(st.binary(min_size=len(GOOD), max_size=len(GOOD)))
def test_any_bytes_of_the_right_length_are_finite_values_or_refused(payload):
    try:
        back = values_of(LowRank(2), payload, 4, 9)
    except CorruptPayload:
        return
    assert bool(torch.isfinite(back).all())


def test_shards_hold_whole_rows_and_know_their_columns():
    shapes = {"big": (3000, 128), "vector": (300,), "small": (5, 7)}
    cut = ShardLayout.of(shapes, LowRank())
    parts = [part for shard in cut.shards for part in shard]
    assert all(part.start % 128 == part.stop % 128 == 0 for part in parts if part.tensor == "big")
    assert {part.tensor: part.columns for part in parts} == {"big": 128, "vector": 0, "small": 7}
    tensors = {
        "big": normal(3000, 2) @ normal(2, 128),
        "vector": torch.ones(300),
        "small": torch.ones(5, 7),
    }
    back = [
        torch.cat(values)
        for values in [cut.decode(i, 0, cut.encode(i, 0, tensors)) for i in range(len(cut.shards))]
    ]
    whole = torch.cat([tensors[name].reshape(-1) for name in shapes])
    assert error(whole, torch.cat(back)) < 0.02
