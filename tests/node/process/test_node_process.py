"""A node refuses a run whose text it lacks, before the run's members count it."""

import pytest

from farflock.node.errors import RefusedByRun
from farflock.node.process.node_process import require_corpus
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
