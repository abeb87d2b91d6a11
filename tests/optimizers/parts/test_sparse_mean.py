"""A peer that left a coordinate out does not pull the mean towards zero."""

import hashlib

import pytest
import torch

from farflock.optimizers.parts.sparse_mean import mean_of_senders


def gathered(**rows):
    return {peer: {"x": torch.tensor(row)} for peer, row in rows.items()}


def test_each_coordinate_is_divided_by_how_many_sent_it():
    mean = mean_of_senders(
        gathered(a=[4.0, 2.0, 0.0, 0.0], b=[2.0, 0.0, 0.0, -3.0], c=[0.0, 0.0, 0.0, -1.0])
    )
    assert mean["x"].tolist() == [3.0, 2.0, 0.0, -2.0]


def test_a_peer_that_sent_only_zeros_changes_nothing():
    with_it = mean_of_senders(gathered(a=[4.0, 1.0], b=[2.0, 0.0], idle=[0.0, 0.0]))
    assert torch.equal(with_it["x"], mean_of_senders(gathered(a=[4.0, 1.0], b=[2.0, 0.0]))["x"])


def test_values_that_cancel_are_zero_and_count_as_sent():
    assert mean_of_senders(gathered(a=[1.0], b=[-1.0], c=[6.0]))["x"].tolist() == [2.0]


def test_peers_are_added_in_their_sorted_order_whatever_the_order_they_came_in():
    """In float32, (1 + 2^24) - 2^24 is 0, but 1 in the opposite order."""
    rows = {"c": [-(2.0**24)], "a": [1.0], "b": [2.0**24]}
    mean = mean_of_senders(gathered(**rows))["x"]
    assert torch.equal(mean, mean_of_senders(gathered(**dict(sorted(rows.items()))))["x"])
    assert mean.tolist() == [0.0]


def test_what_was_gathered_stays_as_it_is():
    held = gathered(a=[1.0], b=[2.0])
    mean_of_senders(held)["x"].zero_()
    assert [held[peer]["x"].item() for peer in "ab"] == [1.0, 2.0]


def digest():
    """One hash at sizes that vector loops take in bulk and at their tails; run by a subprocess too.
    The values come from integers, for torch.randn itself has other bits on other processors."""
    found = hashlib.sha256()
    for size in (1, 7, 257, 4099):
        generator = torch.Generator().manual_seed(size)
        sparse = {
            peer: torch.randint(-999, 999, (size,), generator=generator).relu() / 997
            for peer in "abcde"
        }
        found.update(
            mean_of_senders({peer: {"x": x} for peer, x in sparse.items()})["x"].numpy().tobytes()
        )
    return found.hexdigest()


@pytest.mark.net
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processors_of_any_kind_make_the_same_bits(capability, same_bits):
    same_bits(capability, __file__, digest)
