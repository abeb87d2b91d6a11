"""The benchmark of a whole sync, small: what it counts as ideal, and that what it times was a
sync."""

import pytest

from farflock.experiments.bench import sync
from farflock.experiments.bench.sync import LOST, NoSync, Size, each_way_bytes, measure
from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.netns import NoHosts, hosts
from farflock.experiments.measure.metric import Options


def test_ideal_is_what_reduce_scatter_and_all_gather_move():
    size = Size(parameters=10_000_000)
    assert size.payload_bytes == 40_000_000  # two bytes a value out, two back
    assert [each_way_bytes(size, peers) * 8 / 1e8 for peers in (2, 4, 8)] == pytest.approx(
        [1.6, 2.4, 2.8]
    )
    assert each_way_bytes(Size(1000, out="fp32", back="fp32"), 4) == 0.75 * 8000


def test_the_yardsticks_move_the_bytes_of_the_sync_and_on_loopback_also_all_values_whole():
    size = Size(parameters=10_000_000)
    limited = {"tcp": ("tcp", 10_000_000), "gloo": ("gloo", 20_000_000)}
    assert sync.yardsticks(size, 4, 1e8) == limited
    assert sync.yardsticks(size, 4, None) == {**limited, "fp32": ("gloo", 40_000_000)}


def answer(status="ok", members=2, mean="aa"):
    return {"kind": "done", "status": status, "members": members, "hash": mean, "done_s": 1.0}


@pytest.mark.parametrize(
    "answers",
    [
        [answer(), answer(mean="bb")],
        [answer(), answer(status="partial")],
        [answer("partial"), answer("partial")],
        [answer(members=1), answer(members=1)],
    ],
)
def test_a_round_that_was_no_sync_of_all_is_not_timed(answers):
    sync.require_sync([answer(), answer()])
    with pytest.raises(NoSync):
        sync.require_sync(answers)


@pytest.mark.parametrize("members", [[2, 1], [1, 1], [2, 0]])
def test_a_step_of_the_averagers_that_did_not_average_all_is_not_timed(members):
    sync.require_average([{"members": 2}, {"members": 2}])
    with pytest.raises(NoSync):
        sync.require_average([{"members": each} for each in members])


@pytest.mark.net
@pytest.mark.ci_more
@pytest.mark.usefixtures("forked")
def test_on_loopback_two_processes_sync_and_the_yardsticks_are_other_systems():
    metric, *others, cpu = measure(Size(60_000), 2, Options(repeats=2))
    assert (metric.metric, metric.n, metric.unit) == ("sync.2", 2, "s")
    assert min(metric.yardstick, metric.value) > 0
    assert metric.ratio == pytest.approx(metric.yardstick / metric.value, abs=1e-4)
    assert "loopback" in metric.note
    # hivemind's averagers find no group now and then
    names = ["sync.2.gloo", "sync.2.fp32", "sync.2.hivemind"][: 2 if LOST in metric.note else 3]
    assert [each.metric for each in others] == names
    assert cpu.metric == "sync.2.cpu"
    for other in others:
        assert other.value == metric.value
        assert other.ratio == pytest.approx(other.yardstick / other.value, abs=1e-4)
    assert cpu.unit == "s/GB"
    assert min(cpu.yardstick, cpu.value) > 0


@pytest.mark.ci_more
@pytest.mark.net
@pytest.mark.usefixtures("forked")
def test_where_hivemind_finds_no_group_the_others_are_measured(monkeypatch):
    together = fleet.together

    async def lonely(workers, kind, timeout_s, **fields):
        if kind == "average":
            raise fleet.WorkerFailed("no group")
        return await together(workers, kind, timeout_s, **fields)

    monkeypatch.setattr(fleet, "together", lonely)
    metric, *others = measure(Size(60_000), 2, Options(repeats=1))
    assert metric.note.endswith(LOST)
    assert [each.metric for each in others] == ["sync.2.gloo", "sync.2.fp32", "sync.2.cpu"]


@pytest.mark.long
@pytest.mark.net
@pytest.mark.usefixtures("forked")
def test_at_a_rate_the_yardstick_is_the_ideal_and_no_sync_beats_it():
    try:
        with hosts(1, 1e8):
            pass
    except NoHosts as why:
        pytest.skip(str(why))
    metric, gloo, *_ = measure(Size(400_000), 3, Options(repeats=1, rate_bits=20e6))
    assert metric.yardstick == pytest.approx(2 / 3 * 1_600_000 * 8 / 20e6)
    assert 0 < metric.ratio < 1
    # The same bytes cross the same links, which let a burst pass.
    assert gloo.yardstick > 0.9 * metric.yardstick
    assert "20 Mbit/s" in metric.note


@pytest.mark.net
@pytest.mark.usefixtures("forked")
def test_where_a_rate_cannot_be_had_the_note_says_so_first(monkeypatch):
    monkeypatch.setattr(sync, "obstacle", lambda: "no root here")
    metric, *_ = measure(Size(60_000, out="bf16"), 2, Options(repeats=1, rate_bits=1e8))
    assert metric.note.startswith("NOT at the requested rate (no root here)")
    assert metric.yardstick > 0


def test_one_size_is_measured_alone(monkeypatch):
    monkeypatch.setattr(sync, "measure", lambda size, peers, options: [peers])
    assert list(sync.run(Options(only="sync.4"))) == [4]
    assert list(sync.run(Options(only="sync.8.hivemind"))) == [8]
    assert list(sync.run(Options())) == [2, 4, 8]


@pytest.mark.net
@pytest.mark.long
def test_quick_goes_through_its_sizes(monkeypatch):
    monkeypatch.setattr(sync, "QUICK", Size(1000, (2,), "int8", "fp32"))
    names = [metric.metric for metric in sync.run(Options(repeats=1, quick=True))]
    # hivemind has no such codec
    assert names == ["sync.2", "sync.2.gloo", "sync.2.fp32", "sync.2.cpu"]
