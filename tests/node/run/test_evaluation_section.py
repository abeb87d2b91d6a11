"""The manifest's [evaluation] and [guard]: defaults, what is refused, and where both are off."""

import pytest

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.evaluation_section import EvaluationSection, GuardSection
from farflock.node.run.manifest import parse, resolve

PIPELINE = {"pipeline": {"stages": 2}, "model": {"preset": "demo", "tied": False}}


def test_by_default_a_run_is_evaluated_and_its_guard_warns():
    plan = resolve({}).plan()
    assert plan.evaluation == EvaluationSection(10, 64)
    assert plan.guard == GuardSection("warn", 3)


def test_what_is_written_comes_back_from_the_canonical_text():
    table = {"evaluation": {"every": 7, "sequences": 5}, "guard": {"on": "end", "rising": 4}}
    written = resolve(table)
    assert parse(written.canonical()) == written
    assert (written.evaluation.every, written.guard.on, written.guard.rising) == (7, "end", 4)


def test_runs_that_cannot_be_evaluated_are_not():
    found = resolve({"method": {"name": "local"}})
    assert (found.evaluation.every, found.guard.on) == (0, "off")


def test_a_pipeline_is_evaluated_by_default_and_its_guard_only_warns():
    found = resolve({name: dict(value) for name, value in PIPELINE.items()})
    assert (found.evaluation, found.guard) == (EvaluationSection(10, 64), GuardSection("warn", 3))
    assert found.pipeline_plan() is not None
    assert found.plan().evaluation.every == 10


def test_a_strangers_pipeline_whose_guard_ends_it_is_refused():
    written = resolve({name: dict(value) for name, value in PIPELINE.items()}).canonical()
    ending = written.replace(b'on = "warn"', b'on = "end"')
    assert ending != written
    with pytest.raises(RefusedByRun, match="this version cannot take part"):
        parse(ending)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (PIPELINE | {"guard": {"on": "end"}}, "have no round in common"),
        ({"method": {"name": "local"}, "evaluation": {"every": 5}}, "the method has no rounds"),
        ({"evaluation": {"every": 0}, "guard": {"on": "end"}}, "nothing would ever end the run"),
        ({"evaluation": {"every": -1}}, "evaluation.every"),
        ({"evaluation": {"sequences": 0}}, "evaluation.sequences"),
        ({"guard": {"on": "maybe"}}, "guard.on"),
        ({"guard": {"rising": 1}}, "guard.rising"),
        ({"guard": {"roaring": 1}}, "roaring"),
    ],
)
def test_what_cannot_be_is_refused_in_words(table, said):
    with pytest.raises(Usage, match=said):
        resolve({name: dict(value) for name, value in table.items()})
