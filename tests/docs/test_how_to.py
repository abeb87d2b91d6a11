"""Follow the pages of docs/how-to/ from top to bottom in an empty folder.

Files are written, diffs are applied, and commands run; each must print what the page says. A file
with a folder in its name belongs to a checkout, so the test copies one.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed

from farflock.compression import check as codec_check
from farflock.optimizers.testing import check as method_check

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"
STEP = re.compile(r"(?:`([\w./-]+)`[^`\n]*:\n\n)?```(\w+)\n(.*?)^```$", re.M | re.S)
COPIED = ("optimizers", "compression", "docs", "tests/compression", "tests/golden")
LINKED = ("node", "swarm", "experiments", "tests/worlds")
INSTALLED = Path(sys.executable).parent
LAWS = {"new-method": method_check.LAWS, "new-codec": codec_check.LAWS}


def steps(text):
    """(file or an empty string, language, text) of each code block."""
    return [(match[1] or "", match[2], match[3]) for match in STEP.finditer(text)]


def applied(text, diff):
    """A text after a diff whose context and removed lines stand in it once, one after the other."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
    new = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
    assert text.count(old) == 1, f"these lines stand {text.count(old)} times in the file:\n{old}"
    return text.replace(old, new)


def pattern(said):
    """A command's required output: `...` stands for anything, line breaks for spaces."""
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.", " ".join(said.split())))


def copy_of_the_checkout(target):
    """Copies of what an author writes to, and links to the rest."""
    (target / "tests").mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (target / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "farflock", target / "farflock", symlinks=True)
    for path in (*ROOT.glob("tests/[!t]*.py"), ROOT / "tests" / "seconds.toml"):  # no tests
        shutil.copy(path, target / "tests")
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


@pytest.fixture
def programs(nursery, tmp_path_factory):
    """A folder with `python`, as forks."""
    folder = tmp_path_factory.mktemp("programs")
    nursery.stand_in(folder / "python")
    return folder


def in_a_shell(command, home, folder, programs):
    """A line of a shell, with these programs."""
    search = os.pathsep.join((str(programs), os.environ["PATH"]))
    environment = {
        **os.environ,
        "PATH": search,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = completed(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    return " ".join((done.stdout + done.stderr).split())


def follow(page, home, programs=INSTALLED):
    """Do what a page says; returns the commands. Those in a checkout are fresh processes, which
    import what an author has changed."""
    checkout, scratch = copy_of_the_checkout(home / "farflock"), home / "scratch"
    scratch.mkdir()
    commands = []
    for file, language, text in steps(page):
        path = (checkout if "/" in file else scratch) / file
        if language == "python":
            path.write_text(text)
        elif language == "diff":
            path.write_text(applied(path.read_text(), text))
        else:
            assert language == "console"
            command, _, said = text.removeprefix("$ ").partition("\n")
            is_fresh = "~/farflock" in command
            shown = in_a_shell(command, home, scratch, INSTALLED if is_fresh else programs)
            assert re.search(pattern(said), shown), f"{command} printed: {shown}"
            assert bool(said.strip()) == bool(shown)
            commands.append(command)
    return commands


@pytest.mark.net
@pytest.mark.ci_more
@pytest.mark.parametrize(("name", "commands"), [("new-method", 4), ("new-codec", 4)])
def test_the_page_can_be_followed_literally(tmp_path, programs, name, commands):
    done = follow((PAGES / f"{name}.md").read_text(), tmp_path, programs)
    assert len(done) == commands
    assert done[0] == done[-1] == "python try_it.py"  # right at first, with the mistake at last


@pytest.mark.parametrize("name", LAWS)
def test_the_page_has_every_law_in_its_words(name):
    said = re.findall(r"^- (\d): (.*)$", (PAGES / f"{name}.md").read_text(), re.M)
    assert {int(number): law for number, law in said} == LAWS[name]


@pytest.mark.parametrize("name", LAWS)
def test_every_block_of_python_or_diff_names_its_file(name):
    assert all(
        file or language == "console"
        for file, language, _ in steps((PAGES / f"{name}.md").read_text())
    )


def test_the_lines_that_change_on_the_way_to_a_swarm_stand_in_the_loop():
    page = (PAGES / "from-one-gpu-to-a-swarm.md").read_text()
    (_, _, loop), (_, _, diff), *_ = steps(page)
    before, after = loop.splitlines(), []
    for line in diff.splitlines():
        if line[0] != "+":
            after += before[: before.index(line[1:])]
            before = before[before.index(line[1:]) + 1 :]
        after += [line[1:]] if line[0] != "-" else []
    new = [line for line in diff.splitlines() if line[0] == "+" and "import" not in line]
    assert len(new) == 5
    compile("\n".join(after + before), "train.py", "exec")


@pytest.mark.net
def test_a_page_that_is_wrong_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match="echo two printed: two"):
        follow("```console\n$ echo two\nthree\n```\n", tmp_path)


def test_a_diff_that_does_not_fit_is_found_out():
    assert applied("a\n\nb\nc\n", " a\n\n-b\n+d\n") == "a\n\nd\nc\n"
    with pytest.raises(AssertionError, match="stand 0 times"):
        applied("a\nb\n", "-c\n")
    with pytest.raises(AssertionError, match="stand 2 times"):
        applied("a\na\n", "-a\n")
