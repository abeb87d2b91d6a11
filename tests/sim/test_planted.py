"""The watch is worth something only if it finds mistakes: six planted ones, each within 100 seeds."""

import logging

import pytest

from farflock.node.chaos import run_seed


@pytest.mark.timeout(600)
def test_a_planted_bug_is_found_within_a_hundred_seeds(planted_bug: str):
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    found = next((seed for seed in range(100) if run_seed(seed).violations), None)
    assert found is not None, f"{planted_bug} was not found"
