"""The benchmark of preparing data measures both on the same files."""

from farflock.experiments.bench.data import run
from farflock.experiments.measure.metric import Options


def test_both_rates_are_measured_on_a_few_files():
    (metric,) = run(Options(1, quick=True))
    assert (metric.metric, metric.unit, metric.n) == ("data.prepare", "MB/s", 1)
    assert metric.value > 0
    assert metric.yardstick > 0
    assert "a vocabulary of 500" in metric.note
    assert not list(run(Options(1, quick=True, only="data.other")))
