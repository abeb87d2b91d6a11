"""A node refuses a run whose text it lacks, before the run's members count it, and says what it
computes on."""

import re
from types import SimpleNamespace

import pytest

from farflock.node.errors import RefusedByRun
from farflock.node.model.device import Device
from farflock.node.process.node_process import NodeProcess, require_corpus
from farflock.node.run.manifest import resolve


def trained_on(corpus):
    return resolve({"model": {"preset": "tiny"}, "data": {"corpus": corpus, "sha256": "ab" * 32}})


def test_a_text_that_is_missing_here_is_named_with_its_hash_and_its_place(tmp_path):
    text = tmp_path / "own.txt"
    with pytest.raises(RefusedByRun) as error:
        require_corpus(trained_on(str(text)))
    assert str(error.value) == (
        f"the run trains on {str(text)!r}, which is not on this machine: it has SHA-256"
        f" {'ab' * 8}…, and there is no file {text}; get that file from the run's founder, and"
        " put it there"
    )


def test_a_text_that_is_here_and_the_shipped_one_are_fine(tmp_path):
    (tmp_path / "own.txt").write_text("To be, or not to be\n")
    require_corpus(trained_on(str(tmp_path / "own.txt")))
    require_corpus(trained_on("shakespeare"))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((0, 1), r"this node trains on Double Card, .* free, fp32"),
        ((1,), r"this node serves stage 1 on Double Card, .* free, fp32"),
        ((), "this node trains without weights: servers of stages compute, and not Double Card"),
    ],
)
def test_each_role_of_a_pipeline_says_what_it_computes_on(card, stages, expected):
    servings = tuple(SimpleNamespace(index=index) for index in stages)
    part = SimpleNamespace(servings=servings, serving=next(iter(servings), None))
    machine = SimpleNamespace(device=Device(card, "Double Card", "fp32"))
    node = NodeProcess(machine, *(None,) * 3, part, *(None,) * 5)
    assert re.fullmatch(expected, node.says_device())
