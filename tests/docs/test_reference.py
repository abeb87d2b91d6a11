"""docs/reference/ is what the code says, and the words for it are complete both ways."""

import re
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed

import farflock

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "make_reference.py"


@pytest.fixture
def made(nursery):
    """A function that runs the generator, or a copy of it, in a fork."""

    def run(*arguments, script=SCRIPT):
        command = [sys.executable, str(script), *arguments]
        return completed(command, nursery.run, capture_output=True, text=True, check=False)

    return run


def copy_of_the_script(target):
    """A copy of docs/ with the generator and its pages, to spoil."""
    for path in (SCRIPT, *SCRIPT.parent.glob("generate/*.*"), *SCRIPT.parent.glob("reference/*")):
        copy = target / "docs" / path.relative_to(SCRIPT.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (target / "node").symlink_to(ROOT / "node")
    return target / "docs" / SCRIPT.name


@pytest.mark.net
def test_the_reference_is_what_the_code_says(made):
    done = made("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.net
@pytest.mark.ci_more
def test_a_stale_page_is_shown_as_a_diff(made, tmp_path):
    script = copy_of_the_script(tmp_path)
    page = script.parent / "reference" / "codecs.md"
    page.write_text(page.read_text().replace("| `int8` | 8.12", "| `int8` | 1.12"))
    done = made("--check", script=script)
    assert done.returncode == 1
    assert "-| `int8` | 1.12" in done.stderr
    assert "+| `int8` | 8.12" in done.stderr


@pytest.mark.net
@pytest.mark.ci_more
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"run.seed"', '"run.sead"', "no description of run.seed"),
        ("[partner]", '[partner]\n"smell" = "Unpleasant."', "does not have: smell"),
    ],
)
def test_words_that_do_not_fit_the_code_are_refused(made, tmp_path, before, after, said):
    script = copy_of_the_script(tmp_path)
    words = script.parent / "generate" / "words.toml"
    words.write_text(words.read_text().replace(before, after))
    done = made(script=script)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_statement_of_what_is_stable_names_exactly_what_is_public():
    text = (SCRIPT.parent / "reference" / "python.md").read_text()
    statement = text.partition("## ")[0]
    assert re.findall(r"^- `(\w+)`$", statement, re.M) == sorted(farflock.__all__)
    assert all(f"`farflock.{name}" in text or f"`{name}`" in text for name in farflock.__all__)


def test_rows_stay_on_one_line_and_no_control_character_is_left():
    """A default of a new line, and the mark by which click leaves a paragraph unwrapped."""
    pages = {path.name: path.read_text() for path in SCRIPT.parent.glob("reference/*.md")}
    assert pages
    for name, text in pages.items():
        assert not [each for each in text if ord(each) < ord(" ") and each != "\n"], name
        rows = [line for line in text.splitlines() if line.startswith("|") and " | " in line]
        assert all(row.endswith("|") for row in rows), name
