"""The examples: those of one process run here; `make compat` has the packages that others need."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.waiting import until_real

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = {
    "with_accelerate": ["accelerate"],
    "with_lightning": ["lightning"],
    "with_peft": ["peft", "transformers"],
    "with_torchrun": [],
    "with_trainer": ["transformers", "accelerate"],
}


def printed(name, monkeypatch, capsys, *arguments):
    """What an example prints in this process."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=f"example_{name}")
    return capsys.readouterr().out


def cells():
    """The code of the notebook's cells."""
    book = json.loads((EXAMPLES / "local_swarm.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.ci_more
def test_a_method_of_one_s_own_trains_four_peers(monkeypatch, capsys):
    said = printed("own_method", monkeypatch, capsys)
    assert said.count("example_own_method.LocalSGD") == 4
    assert "ok, 4 peers" in said
    (sums,) = re.findall(r"sums of agreed weights: (.*)", said)
    assert len(sums.split()) == 4
    assert len(set(sums.split())) == 1


@pytest.mark.ci_more
def test_images_are_told_apart_by_both_peers(monkeypatch, capsys):
    said = printed("vision", monkeypatch, capsys, "20")
    (shares,) = re.findall(r"found: (.*)", said)
    assert all(float(share) > 0.8 for share in shares.split())


@pytest.mark.ci_more
def test_the_notebook_runs_from_top_to_bottom(capsys):
    space = {"__name__": "notebook"}
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"cell {number}", "exec"), space)
    said = capsys.readouterr().out
    assert "equal: True" in said
    assert "2 members" in said


def test_each_example_has_sixty_lines_at_most():
    programs = list(EXAMPLES.glob("*.py"))
    assert {path.stem for path in programs} >= {"own_method", "plain_loop", "vision", *PACKAGES}
    for path in programs:
        assert len(path.read_text().splitlines()) <= 60, path.name
    assert sum(len(cell.splitlines()) for cell in cells()) <= 60


def started(command, said, folder):
    """A program that writes what it says to a file."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "STEPS": "20",
    }
    with said.open("w") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=folder, env=environment
        )


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_two_programs_with_other_packages_end_with_the_same_weights(tmp_path, name):
    for package in PACKAGES[name]:
        pytest.importorskip(package, reason="`make compat` installs it")
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(several if name == "with_torchrun" else [])]
    command.append(str(EXAMPLES / f"{name}.py"))
    files = [tmp_path / "founder.txt", tmp_path / "joiner.txt"]
    processes = [started(command, files[0], tmp_path)]
    try:
        until_real(
            lambda: "join with" in files[0].read_text() or processes[0].poll() is not None,
            "the invite",
            files[0].read_text,
        )
        invites = re.findall(r"join with: .* (\S+)", files[0].read_text())
        processes += [started([*command, invite], files[1], tmp_path) for invite in invites]
        for process, file in zip(processes, files, strict=True):
            until_real(lambda each=process: each.poll() is not None, name, file.read_text)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [file.read_text() for file in files]
    assert [process.returncode for process in processes] == [0, 0], texts
    weights = {re.search(r"weights: (\S+)", text)[1] for text in texts}
    assert len(weights) == 1, texts
    assert all("2 members" in text for text in texts), texts
