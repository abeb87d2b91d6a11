"""The watch is worth something only if it finds mistakes: six planted ones, and one of returns,
each within 100 seeds."""

import logging

from farflock.node.simulate.chaos import run_seed
from farflock.node.simulate.returns_chaos import run_returns_seed
from farflock.node.state.kept_views import KeptViews
from farflock.swarm.protocol.views import Chain

# seeds that have found one before; no more than the order in which all hundred are tried
TELLING = (
    0,
    2,
    4,
    7,
    12,
)
TELLING_RETURNS = (3,)


def test_a_planted_bug_is_found_within_a_hundred_seeds(planted_bug: str):
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    seeds = sorted(range(100), key=lambda seed: seed not in TELLING)
    found = next((seed for seed in seeds if run_seed(seed).violations), None)
    assert found is not None, f"{planted_bug} was not found"


def test_views_that_are_not_on_the_disk_before_anybody_acts_in_them_are_found(monkeypatch):
    """The last view is in the system's cache only, so every end of a life takes it. All forget
    together what they did in it, and nobody is left to contradict: they sign a return of the view
    before, or the founder starts the run again as if it had been alone."""
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    keep = KeptViews.keep
    monkeypatch.setattr(
        KeptViews,
        "keep",
        lambda self, chain: keep(self, Chain(chain.run, chain.views[:-1] or chain.views)),
    )
    words = "and signed a return of view", "starts the run again, and does not ask"
    seeds = sorted(range(100), key=lambda seed: seed not in TELLING_RETURNS)
    found = (what for seed in seeds for what in run_returns_seed(seed).violations)
    assert any(each in what for what in found for each in words)
