"""A peer that dies at any point of an exchange costs the others no step: real links, SIGKILL."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
from worlds.waiting import ended, told, until_real

from farflock.swarm.identity import Identity

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
MORTAL = str(Path(__file__).with_name("mortal.py"))
PEERS, TOKENS_PER_STEP, PERIOD = 4, 64, 5
PHASES = [
    "before its offer",
    pytest.param("after its offer", marks=pytest.mark.long),
    "while it reduces",
    pytest.param("after it has reduced", marks=pytest.mark.long),
    pytest.param("when it has proposed", marks=pytest.mark.long),
]


class Swarm:
    """The peers of one test, by what they write into a folder."""

    def __init__(self, nursery, folder):
        self.nursery, self.folder, self.processes = nursery, folder, {}

    def start(self, number, phase):
        command = [sys.executable, MORTAL, str(self.folder), str(number), phase]
        with (self.folder / f"errors-{number}").open("wb") as errors:
            self.processes[number] = self.nursery.popen(command, cwd=ROOT, stderr=errors)

    def told(self):
        return "\n".join(
            f"{told(number, process, self.folder / f'errors-{number}')}\n{self.log(number)[-3:]}"
            for number, process in self.processes.items()
        )

    def log(self, number):
        with contextlib.suppress(OSError):
            return [
                json.loads(line)
                for line in (self.folder / f"log-{number}").read_text().splitlines()
            ]
        return []

    def noted(self, number, kind):
        return [entry for entry in self.log(number) if entry["kind"] == kind]

    def wait(self, condition):
        until_real(condition, "what the test waits for", self.told)

    def alive(self, number):
        return self.processes[number].poll() is None

    def end(self):
        for process in self.processes.values():
            process.kill()
            ended(process, "a peer", self.told)


@pytest.fixture
def swarm(nursery, tmp_path):
    made = Swarm(nursery, tmp_path)
    yield made
    made.end()


def member(number):
    """What a round's report calls this peer; mortal.py gives it its seed."""
    return Identity.from_seed(bytes([number + 1]) * 32).peer


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_go_on_with_one_state_and_every_step_of_theirs_counted(swarm, phase):
    for number in range(PEERS):
        swarm.start(number, phase)
    swarm.wait(lambda: [number for number in range(PEERS) if not swarm.alive(number)])
    victim = int((swarm.folder / "victim").read_text())
    others = [number for number in range(PEERS) if number != victim]
    (died,) = swarm.noted(victim, "dies")
    swarm.wait(lambda: all(swarm.noted(number, "trained") for number in others))
    (swarm.folder / "finish").touch()
    swarm.wait(lambda: all(swarm.noted(number, "end") for number in others))
    ends = [swarm.noted(number, "end")[0] for number in others]
    assert len({end["state"] for end in ends}) == 1
    assert len({end["round"] for end in ends}) == 1
    assert len({end["agreed"] for end in ends}) == 1
    assert not [number for number in others if swarm.noted(number, "adopt")]

    theirs, lost = {member(number) for number in others}, member(victim)
    for number in others:
        rounds = swarm.noted(number, "round")
        assert [entry["round"] for entry in rounds] == list(
            range(rounds[0]["round"], rounds[-1]["round"] + 1)
        )
        assert any(set(entry["participants"]) == theirs for entry in rounds)

    counted = [end["step"] * TOKENS_PER_STEP - end["uncounted"] for end in ends]
    with_it = [entry for entry in rounds if lost in entry["participants"]]
    least, most = len(with_it) * PERIOD * TOKENS_PER_STEP, died["step"] * TOKENS_PER_STEP
    assert 0 < least <= ends[0]["agreed"] - sum(counted) <= most
