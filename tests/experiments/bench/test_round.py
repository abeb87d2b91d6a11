"""A round's processor time and memory are those of a real member, phase by phase."""

import math

import pytest

from farflock.experiments.bench import round as bench
from farflock.experiments.bench.workers.round_member import Member, Settings, matrices
from farflock.experiments.measure.metric import NotMeasured


@pytest.mark.parametrize("name", bench.METHODS)
def test_a_member_makes_rounds_and_its_replica_follows_phi(name):
    options = {**bench.METHODS[name], "period": 1}
    member = Member(Settings(name, options, 10_000, 2, name in bench.WITH_MOMENTS))
    first, second = member.round(), member.round()
    phases = {"due", "hash", "encode", "digest", "decode", "apply"}
    kind = {"check"} if name == "sparseloco" else {"reduce"}
    assert first["seconds"].keys() == second["seconds"].keys() == phases | kind
    assert second["payload_bytes"] > 0
    assert second["parameters"] == member.count
    method, replica = member.driver.method, member.replica
    assert int(method.snapshot(replica)["round"]) == 2
    phi, theta = method.eval_params(replica), replica.read(replica.names, "param")
    assert all(float((phi[key] - theta[key]).abs().max()) < 0.1 for key in phi)


@pytest.mark.net
def test_a_metric_is_measured_in_a_process_of_its_own(quick):
    metrics = list(bench.run(quick(parameters=1_000_000, method="diloco")))
    assert [one.metric for one in metrics] == ["round.diloco.1m", "round.memory.diloco.1m"]
    speed, memory = metrics
    assert 0 < speed.value < math.inf
    assert "encode" in speed.note
    assert memory.yardstick > 64 * bench.MIB


@pytest.mark.net
def test_codec_threads_are_compared_with_one_in_turns(quick):
    (line,) = bench.run(quick(parameters=1_000_000, method="lean", codec_threads=2))
    assert line.metric == "round.threads.lean.1m"
    assert line.n == 2
    assert 0 < line.ratio < math.inf
    assert "2 threads next to one" in line.note


@pytest.mark.net
def test_a_member_that_fails_is_no_measurement(monkeypatch, quick):
    monkeypatch.setattr(bench, "WORKER", "farflock.experiments.bench.no_such_module")
    with pytest.raises(NotMeasured, match=r"the member of diloco ended with 1: .*no_such_module"):
        list(bench.run(quick()))


@pytest.mark.parametrize(
    ("count", "name"), [(10_000, "10000"), (2_000_000, "2m"), (1_200_000_000, "1.2b")]
)
def test_sizes_have_short_names(count, name):
    assert bench.size_name(count) == name


@pytest.mark.parametrize("count", [5_000, 30_000_000, 1_200_000_000])
def test_the_matrices_have_about_as_many_parameters_as_asked_for(count):
    total = sum(rows * columns for rows, columns in matrices(count).values())
    assert abs(total - count) <= max(2048**2, 0.01 * count)
