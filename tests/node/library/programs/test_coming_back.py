"""Programs with `SwarmOptimizer(folder=...)` that are killed and started again in their folders:
they go on in their run, and never begin another one, or from fresh weights."""

import json
import os
import sys

import pytest
from worlds.waiting import told, until_real

pytestmark = pytest.mark.net

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch, farflock

torch.set_num_threads(1)
folder, invite = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
model = torch.nn.Linear(8, 1)  # other weights in each life
options = {} if invite else {"period": 5, "view_s": 1.0, "deadline_s": 10.0}
options |= {"folder": folder, "checkpoint_s": 0.2}
with farflock.SwarmOptimizer(model, "diloco", invite, lr=1e-2, **options) as optimizer:
    (folder / "invite").write_text(optimizer.invite)
    while True:
        with (folder / "seen").open("a") as file:
            last = optimizer.last_round
            weights = [float(x.sum()) for x in optimizer.eval_params().values()]
            peers = last.peers if last is not None and last.status == "ok" else 0
            print(json.dumps([peers, weights, optimizer.run_steps(), optimizer.tokens]), file=file)
        x = torch.randn(16, 8)
        time.sleep(0.05)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
"""


class Programs:
    """Processes of the program, by the name of their folder."""

    def __init__(self, popen, folder):
        self.popen, self.folder, self.processes = popen, folder, {}
        (folder / "program.py").write_text(PROGRAM)

    def start(self, name, *invite):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "seen").unlink(missing_ok=True)
        with open(folder / "log.txt", "ab") as log:
            self.processes[name] = self.popen(
                [sys.executable, str(self.folder / "program.py"), str(folder), *invite],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def seen(self, name):
        """What this life of a program has seen: of each step the peers of the last round, the
        weights, the run's steps and tokens."""
        try:
            lines = (self.folder / name / "seen").read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reaches(self, name, reached, what):
        def met():
            assert self.processes[name].poll() is None, self.told()
            return reached(self.seen(name))

        return until_real(met, f"{what} of {name}", self.told)

    def has_rounds_of_two(self, name):
        self.reaches(name, lambda seen: 2 in [peers for peers, *_ in seen], "a round of two")

    def invite(self, name):
        path = self.folder / name / "invite"
        return until_real(lambda: path.exists() and path.read_text(), "an invite", self.told)

    def begin(self):
        """Start two programs; return their invite once they train together, and each has a state on
        its disk."""
        self.start("founder")
        invite = self.invite("founder")
        self.start("joiner", invite)
        for name in ("founder", "joiner"):
            self.has_rounds_of_two(name)
            kept = self.folder / name / "checkpoints"
            until_real(lambda kept=kept: list(kept.glob("*/step-*")), "a state", self.told)
        return invite

    def told(self):
        return "\n".join(
            told(name, process, self.folder / name / "log.txt")
            for name, process in self.processes.items()
        )


@pytest.fixture
def programs(nursery, tmp_path):
    made = Programs(nursery.popen, tmp_path)
    yield made
    for name in made.processes:
        made.kill(name)


def test_a_founder_whose_others_live_goes_back_to_them(programs):
    programs.begin()
    programs.kill("founder")
    programs.start("founder")
    programs.has_rounds_of_two("founder")


@pytest.mark.ci_more
@pytest.mark.parametrize("first", ["founder", "joiner"])
def test_programs_that_were_both_killed_go_on_together_whoever_starts_first(programs, first):
    invite = programs.begin()
    before = programs.seen("joiner")[-1]
    for name in ("founder", "joiner"):
        programs.kill(name)
    words = {"founder": (), "joiner": (invite,)}
    programs.start(first, *words.pop(first))
    for name, more in words.items():
        programs.start(name, *more)
    for name in ("founder", "joiner"):
        programs.has_rounds_of_two(name)
        # of the run, and not of one that has begun again
        assert programs.seen(name)[0][2] > before[2] / 2


def test_a_founder_that_is_alone_goes_on_from_the_state_in_its_folder(programs):
    programs.start("founder")
    programs.reaches("founder", lambda seen: len(seen) > 40, "forty steps")
    programs.kill("founder")
    before = programs.seen("founder")
    programs.start("founder")
    programs.reaches("founder", lambda seen: len(seen) > 2, "steps")
    _, weights, steps, tokens = programs.seen("founder")[0]
    assert weights in [entry[1] for entry in before]
    assert 0 < steps <= before[-1][2]
    assert 0 < tokens <= before[-1][3]
