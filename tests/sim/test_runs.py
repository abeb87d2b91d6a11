"""Whole runs of the shipped manifests, by the command that README names: 20 % of all frames lost,
peers die and come back.

The everyday sizes are the same runs with fewer peers and tokens.
"""

import statistics
from pathlib import Path

import pytest

RUNS = Path(__file__).parents[2] / "experiments" / "runs"
WEATHER = ("--loss", "0.2", "--churn", "20")
FP32 = ("--set", "exchange.codec=fp32", "--set", "exchange.return_codec=fp32")
LONG = pytest.mark.long
SEEDS = 5
SMALL_NOLOCO = ("--peers", "8", "--set", "run.total_tokens=8192", "--churn", "1")
SMALL_DILOCO = ("--peers", "6", "--set", "run.total_tokens=12000", "--churn", "4")
SIZES = [
    pytest.param("noloco-64", SMALL_NOLOCO, id="noloco-8"),
    pytest.param("diloco-16", SMALL_DILOCO, id="diloco-6", marks=pytest.mark.long),
    pytest.param("noloco-64", ("--peers", "64"), id="noloco-64", marks=LONG),
    pytest.param("diloco-16", ("--peers", "16"), id="diloco-16", marks=LONG),
]


def run_file(name):
    return RUNS / f"{name}.toml"


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_shipped_run_with_loss_and_churn_learns_and_ends_twice_in_the_same_state(
    simulated, name, size
):
    once = simulated(run_file(name), *WEATHER, *size)
    assert simulated(run_file(name), *WEATHER, *size) == once
    assert once["kills"] >= 1
    assert once["held_out_loss"] < once["losses"][0] - 10 * once["held_out_standard_error"]


@pytest.mark.long
def test_int8_sends_less_than_raw_and_is_within_noise_of_it_over_seeds(simulated):
    """Without loss and churn: among them raw payloads take longer, so other rounds are partial."""
    differences = []
    for seed in range(SEEDS):
        common = (run_file("diloco-16"), "--peers", "16", "--set", f"run.seed={seed}")
        small, raw = simulated(*common), simulated(*common, *FP32)
        assert small["bytes"] < raw["bytes"]
        differences.append(small["held_out_loss"] - raw["held_out_loss"])
    error = statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.mean(differences)) < 3 * error + 0.01, differences
