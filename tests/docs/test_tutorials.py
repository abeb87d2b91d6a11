"""The tutorials and the how-to pages of commands are true: every command and option exists, and
whole tutorials run from top to bottom in an empty folder with real processes on loopback.

A page's files stand under a line such as `run.toml`:, its commands in `console` blocks, each on a
line that begins with `$`. A command that ends with `&` stays in the background; what others print
stands below them, with `...` for anything.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = ("volunteer", "coordinator", "researcher", "afternoon")
PAGES = [DOCS / "index.md", *sorted(DOCS.glob("tutorials/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
STEP = re.compile(r"(?:`([\w.-]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)
REFERENCE = (DOCS / "reference" / "commands.md").read_text()
INSTALLED = Path(sys.executable).parent
RUN_S = 500  # of a machine that does much else; a tutorial takes up to 50 s of processor time


def steps(text):
    """(file, its text) and (None, (command, what it prints)), in order."""
    for file, language, body in STEP.findall(text):
        if language == "console":
            yield from ((None, found) for found in COMMAND.findall(body))
        elif file:
            yield file, body


def pattern(said):
    """A command's required output: `...` stands for anything, line breaks for spaces."""
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.", " ".join(said.split())))


def script(text):
    """A shell script that does what a page says, with a mark before each command."""
    lines = ["set -e"]
    for number, (file, body) in enumerate(steps(text)):
        if file is not None:
            lines.append(f"cat > {file} <<'END OF FILE'\n{body}END OF FILE")
            continue
        command = body[0]
        if command.endswith("&"):
            command = f"{command[:-1]} > background-{number}.log 2>&1 &"
        lines += [f"echo '@@@ {number}'", command]
    return "\n".join(lines) + "\n"


@pytest.fixture
def programs(nursery, tmp_path_factory):
    """A folder with `farflock` and `python`: this tree's as forks, or what `PROGRAMS` names."""
    if "PROGRAMS" in os.environ:  # a wheel's: `make compat`
        return Path(os.environ["PROGRAMS"])
    folder = tmp_path_factory.mktemp("programs")
    nursery.stand_in(folder / "farflock", "-m", "farflock.node.cli")
    nursery.stand_in(folder / "python")
    return folder


def run(text, folder, programs=INSTALLED):
    """Do what a page says; return what each command printed, by number."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if "PROGRAMS" in environment:
        del environment["PYTHONPATH"]
    environment["PATH"] = os.pathsep.join((str(programs), os.environ["PATH"]))
    environment["XDG_DATA_HOME"] = environment["HOME"] = str(folder)
    child = subprocess.Popen(
        ["bash", "-c", script(text)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(logs(folder)) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # all has ended, as it should
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode == 0, said + logs(folder)
    parts = re.split(r"^@@@ (\d+)\n", said, flags=re.M)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


def logs(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("background-*.log")))


@pytest.mark.ci_more
@pytest.mark.net
@pytest.mark.timeout(RUN_S + 100)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_can_be_followed_literally(tmp_path, programs, name):
    text = (DOCS / "tutorials" / f"{name}.md").read_text()
    printed = run(text, tmp_path, programs)
    for number, (file, body) in enumerate(steps(text)):
        if file is None and not body[0].endswith("&"):
            shown = " ".join(printed[number].split())
            assert re.search(pattern(body[1]), shown), f"{body[0]} printed: {shown}"


def test_every_command_that_a_page_names_exists_with_its_options():
    wrong = []
    for page in PAGES:
        named = r"\bfarflock ((?:data |tokenizer )?[a-z]+)\b([^`\n|#]*)"
        for name, rest in re.findall(named, commands(page)):
            section = re.search(rf"^## farflock {name}\n(.*?)(?=^## |\Z)", REFERENCE, re.M | re.S)
            options = re.findall(r"(?<![\w-])--[a-z-]+", rest)
            known = section[1] if section else ""
            if section is None or any(f"`{each}`" not in known for each in options):
                wrong.append(f"{page.name}: farflock {name}{rest}")
    assert not wrong


def commands(page):
    """The commands of a page: those of its blocks, and those in a line of text."""
    text = page.read_text().replace("\\\n", " ")
    return "\n".join(re.findall(r"^\$ .*$", text, re.M) + re.findall(r"`(farflock [^`]*)`", text))


def test_every_tutorial_has_commands_and_ends_what_it_began():
    for name in TUTORIALS:
        all_steps = list(steps((DOCS / "tutorials" / f"{name}.md").read_text()))
        ran = [body[0] for file, body in all_steps if file is None]
        assert len(ran) >= 6
        begun = [number for number, line in enumerate(ran) if line.endswith("&")]
        assert not begun or "wait" in ran[begun[-1] :]


@pytest.mark.net
def test_a_command_that_prints_something_else_is_found_out(tmp_path):
    text = (
        "`a.txt`:\n\n```text\none\n```\n\n"
        "```console\n$ cat a.txt\nt...o\n$ sleep 0 &\n$ wait\n```\n"
    )
    printed = run(text, tmp_path)
    assert printed[1].strip() == "one"
    assert not re.search(pattern("t...o"), printed[1])


@pytest.mark.net
def test_a_command_that_fails_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match=r"[Nn]o (such )?command"):
        run("```console\n$ farflock fly\n```\n", tmp_path)
