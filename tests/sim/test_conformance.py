"""Every method x alone, 2, 4 and 7 peers x every misfortune, on the product's own nodes in virtual
time, watched all along: equal bits (or nearly, or only equal means, as the method promises),
tokens and bytes that add up, nothing twice, progress.

Every day all misfortunes strike one after the other, in an order drawn for each cell;
each of them must show. Methods take turns with 2 and 7 peers. Among the long tests are all other
cells; there misfortunes strike alone too, and every arm of the disasters takes its turn.
"""

import logging

import pytest
from worlds.trial import MISFORTUNES, tried

from farflock.node.simulate.chaos_methods import ARMS
from farflock.optimizers.catalog import METHODS

SIZES = (1, 2, 4, 7)
SEEDS = 3
LONG = pytest.mark.long


def require_clean(arm, size, misfortunes, seed=0):
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    trial, report = tried(arm, size, misfortunes, seed)
    cell = f"{arm.method}, {size} peers, {misfortunes}, seed {seed}"
    assert report.violations == [], f"{cell}: {report.violations[0]}"
    assert [one for one in trial.happened if not trial.shown[one]] == [], cell
    assert set(misfortunes) <= set(trial.happened)
    assert bool(report.rounds) == (arm.method != "local"), cell
    return report


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == (2, 7)[place % 2] else LONG)
        for place, name in enumerate(METHODS)
        for size in SIZES
    ],
)
def test_a_method_keeps_its_promise_among_all_misfortunes(name, size):
    arm = next(arm for arm in ARMS if arm.method == name)
    require_clean(arm, size, MISFORTUNES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "arm",
    [pytest.param(arm, id=f"{place}-{arm.method}", marks=LONG) for place, arm in enumerate(ARMS)],
)
def test_an_arm_keeps_its_promise_in_each_misfortune_alone_and_in_all_in_other_orders(arm, size):
    for misfortune in MISFORTUNES:
        require_clean(arm, size, (misfortune,))
    for seed in range(1, 1 + SEEDS):
        require_clean(arm, size, MISFORTUNES, seed)


def test_the_same_trial_ends_twice_in_the_same_state():
    arm = ARMS[1]
    assert require_clean(arm, 4, MISFORTUNES) == require_clean(arm, 4, MISFORTUNES)
