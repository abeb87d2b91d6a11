"""A whole run is that of two processes over real links, and its memory is held against a sum."""

import dataclasses

import pytest

from farflock.experiments.bench import whole
from farflock.experiments.measure.metric import NotMeasured
from farflock.node.model.llama import PRESETS

GIB = 1024**3


@pytest.mark.net
@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_two_processes_train_exchange_and_end_with_one_state_and_a_third_joins(quick, monkeypatch):
    settings = whole.Settings

    def that_admit_soon(options, **others):
        return settings(options={**options, "view_s": 1.0}, **others)

    monkeypatch.setattr(whole, "Settings", that_admit_soon)
    memory, time, join = whole.run(quick(method="diloco"))
    size = PRESETS["demo"].parameters()
    assert [memory.metric, time.metric] == [f"whole.diloco.{size}", f"whole.cpu.diloco.{size}"]
    assert join.metric == f"whole.join.diloco.{size}"
    assert 50e6 < join.value < GIB < join.yardstick
    assert 50e6 < memory.value < GIB
    assert memory.yardstick > GIB
    assert time.value > 0
    assert time.n == 2 * whole.QUICK.rounds


@pytest.mark.parametrize(
    ("parameters", "found"), [(None, 0), (124_000_000, 0), (300_000_000, 1), (1_200_000_000, 2)]
)
def test_a_size_names_its_case(parameters, found):
    assert whole.case_of(parameters) is whole.CASES[found]


def test_a_size_without_a_case_is_refused():
    with pytest.raises(NotMeasured, match=r"one of 123\.6m, .*, 1\.236b parameters"):
        whole.case_of(50_000_000)


def test_a_method_that_reads_moments_is_not_measured_with_an_optimizer_without_any(
    quick, monkeypatch
):
    without = dataclasses.replace(whole.QUICK, inner="sgd")
    monkeypatch.setattr(whole, "QUICK", without)
    with pytest.raises(NotMeasured, match="lean reads the optimizer's moments, and sgd has none"):
        next(whole.run(quick(method="lean")))
    measured = []
    monkeypatch.setattr(whole, "_peers", lambda case, method: measured.append(method))
    monkeypatch.setattr(whole, "_memory", lambda *given: given[0])
    monkeypatch.setattr(whole, "_time", lambda *given: given[0])
    monkeypatch.setattr(whole, "_join", lambda *given: given[0])
    list(whole.run(quick()))
    assert measured == ["diloco", "sparseloco"]


def test_what_is_needed_is_counted_by_its_parts():
    case = dataclasses.replace(whole.QUICK, dtype="bfloat16")
    count = case.model.parameters()
    needed = whole.needed_bytes(case, "diloco")
    assert needed["weights"] == needed["gradients"] == 2 * count
    assert needed["moments"] == 4 * count
    assert needed["state"] == 8 * count, "phi and the momentum, in float32"
    # Its own contribution, half of the other's, and the whole result in bf16.
    assert needed["payloads"] == pytest.approx(1.5 * count + 2 * count, rel=0.02)
    assert whole.needed_bytes(dataclasses.replace(case, outer="disk"), "diloco")["state"] == 0
    assert whole.needed_bytes(case, "sparseloco")["payloads"] < 0.1 * count


GOOD = [{"kind": "round", "status": "ok", "peers": 2}, {"kind": "done", "state": "aa"}]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (GOOD[:1], "ended early"),
        ([], "ended early"),
        ([{"kind": "round", "status": "alone", "peers": 1}, GOOD[1]], "not complete"),
        ([GOOD[0], {"kind": "done", "state": "bb"}], "different states"),
    ],
)
def test_rounds_that_are_not_of_two_are_no_measurement(other, why):
    whole.require_rounds([GOOD, GOOD])
    with pytest.raises(NotMeasured, match=why):
        whole.require_rounds([GOOD, other])
