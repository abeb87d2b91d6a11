"""A stored run is found again for exactly the same job and the same code."""

import pytest

from farflock.experiments.reproduce import version
from farflock.experiments.reproduce.job import Outcome, key
from farflock.experiments.reproduce.shelf import Shelf, write


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "reproduce")


def test_a_new_shelf_is_empty_and_makes_nothing(shelf, line):
    assert shelf.find(line()) is None
    assert shelf.said("interval", "cpu") is None
    assert not shelf.folder.exists()


def test_an_outcome_is_found_again_whole(shelf, line, outcome):
    kept = outcome(2.5)
    shelf.keep(line(), kept)
    assert shelf.find(line()) == kept
    assert list((shelf.folder / "arms" / key(line())).iterdir()), (
        "the job is kept next to it, for a reader"
    )


def test_an_outcome_of_a_run_that_diverged_is_kept_too(shelf, line):
    shelf.keep(line(), Outcome(metrics={}, diverged=True))
    assert shelf.find(line()).diverged


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"lr": 1e-3}, {"steps": 5}, {"batch": 2}, {"corpus": "0"}, {"clip": 0.0}],
)
def test_another_configuration_is_another_job(shelf, line, outcome, change):
    shelf.keep(line(), outcome(2.5))
    assert shelf.find(line(**change)) is None


def test_a_swarm_and_a_line_never_share_a_place(swarm, line, noise):
    keys = {
        key(line()),
        key(swarm()),
        key(swarm(late=0.1)),
        key(swarm(options={"period": 3})),
        key(noise()),
    }
    assert len(keys) == 5


def test_a_file_that_was_cut_short_counts_as_none(shelf, line, outcome):
    shelf.keep(line(), outcome(2.5))
    path = shelf.folder / "arms" / key(line()) / "outcome.json"
    path.write_bytes(path.read_bytes()[:20])
    assert shelf.find(line()) is None


def test_writing_leaves_no_partial_file(tmp_path):
    write(tmp_path / "a", b"1")
    write(tmp_path / "a", b"2")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"2"]


def test_an_arm_runs_through_the_loop_the_links_and_its_own_method_only():
    found = version.closure([*version.ROOTS["swarm"], "farflock.optimizers.diloco"])
    wanted = {
        "farflock.node.loop",
        "farflock.swarm.sim.network",
        "farflock.optimizers.parts.outer",
        "farflock.node.simulate.simulation",
    }
    assert wanted <= set(found)
    assert not {
        "farflock.optimizers.noloco",
        "farflock.node.cli.main",
        "farflock.swarm.dht.kademlia",
    } & set(found)


def test_a_line_is_not_run_again_for_a_change_of_the_links():
    assert "farflock.swarm.sim.network" not in version.closure(version.ROOTS["line"])


def test_a_change_of_the_code_is_another_version(monkeypatch, tmp_path):
    source = tmp_path / "node" / "loop.py"
    source.parent.mkdir()
    monkeypatch.setattr(version, "PACKAGE", tmp_path)
    hashes = []
    for text in ("x = 1", "x = 2", "from farflock.node.other import y\nx = 2"):
        source.write_text(text)
        version.sources_hash.cache_clear()
        hashes.append(version.sources_hash(("farflock.node.loop",)))
    (tmp_path / "node" / "other.py").write_text("y = 1")
    version.sources_hash.cache_clear()
    hashes.append(version.sources_hash(("farflock.node.loop",)))
    assert len(set(hashes)) == 4
    version.sources_hash.cache_clear()


BEFORE = '''
"""A module."""

class One:
    """A class."""

    def two(self, three):
        """A method."""
        return three + 1
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("return three", "# a comment\n        return three", True),
        ('"""A module."""', "", True),
        ('"""A class."""', '"""Another text."""', True),
        ('"""A method."""', '"""A method.\n\n        With a body."""', True),
        ("return three + 1", "return (\n            three\n            + 1\n        )", True),
        ("+ 1", "+ 2", False),
        ("return three + 1", "return 'a method.'", False),
        ("two(", "too(", False),
        ("three + 1", "(three, 1)", False),
    ],
)
def test_a_version_is_that_of_the_syntax_without_docstrings(old, new, same):
    assert old in BEFORE
    assert (version._syntax_hash(BEFORE) == version._syntax_hash(BEFORE.replace(old, new))) == same


def test_the_codecs_of_a_method_count_by_option_and_by_default(swarm):
    sparse = swarm(method="sparseloco", options={"period": 2})
    assert "farflock.compression.topk" in version.codecs_of(sparse.method, sparse.options)
    packed = version.codecs_of("diloco", {"codec": "bf16+zstd"})
    assert {"farflock.compression.zstd", "farflock.compression.floats"} <= set(packed)


def test_the_version_of_torch_counts(line, monkeypatch):
    before = version.code_version(line())
    monkeypatch.setattr(version.torch, "__version__", "9.9.9")
    assert version.code_version(line()) != before
