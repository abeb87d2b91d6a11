"""Who comes into a run of real processes, and who is put out of it: the founder's commands."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farflock.node.process.brake import BRAKE

pytestmark = [pytest.mark.net, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
RUN = """
[run]
name = "invited"
total_tokens = 100_000_000
[model]
preset = "tiny"
[train]
batch = 2
seq = 16
[method]
name = "diloco"
[method.options]
period = 10
[exchange]
view_s = 1.0
[trust]
members_invite = false
"""
COMMAND = (sys.executable, "-m", "farflock.node.cli")


@pytest.fixture
def home(nursery, tmp_path, monkeypatch):
    """A folder for nodes, which take slow steps and are killed at the end, and how to call them."""
    (tmp_path / "brake").write_text("0.05")
    monkeypatch.setenv(BRAKE, str(tmp_path / "brake"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "run.toml").write_text(RUN)
    nodes = []

    class Home:
        def start(self, name, *words):
            with (tmp_path / f"{name}.txt").open("wb") as err:
                command = [*COMMAND, *words, "--folder", str(tmp_path / name)]
                nodes.append(
                    nursery.popen(
                        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err, env=os.environ
                    )
                )

        def call(self, *words):
            done = nursery.run(
                [*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
            return done.returncode, done.stdout, done.stderr

        def status(self, name):
            try:
                return json.loads((tmp_path / name / "status.json").read_text())
            except FileNotFoundError:
                return {"members": [], "doing": "", "is_member": False, "peer": ""}

        def until(self, there, what):
            ends_s = time.monotonic() + 60
            while not there():
                assert time.monotonic() < ends_s, what
                time.sleep(0.2)

    yield Home()
    for node in nodes:
        node.kill()
        node.wait()


def test_an_invite_lets_in_as_many_as_it_says_and_a_ban_puts_one_out(home, tmp_path):
    home.start("founder", "run", str(tmp_path / "run.toml"))
    home.until(lambda: home.status("founder").get("invite"), "the founder")
    folder = ("--folder", str(tmp_path / "founder"))
    code, word, err = home.call("invite", "--uses", "1", *folder)
    assert code == 0, err
    (tmp_path / "one.txt").write_text(word)

    home.start("first", "join", str(tmp_path / "one.txt"))
    home.until(lambda: home.status("first")["is_member"], "the first peer's admission")
    assert home.status("first")["invite"] == ""  # only the founder invites here
    home.start("second", "join", str(tmp_path / "one.txt"))
    home.until(
        lambda: (
            "the run does not let this peer in: its capability is used up"
            in (tmp_path / "second.txt").read_text()
        ),
        "the second peer's refusal",
    )
    assert len(home.status("founder")["members"]) == 2

    first = home.status("first")["peer"]
    code, _, err = home.call("ban", first[-8:], "--folder", str(tmp_path / "first"))
    assert (code, "only the run's founder" in err) == (1, True)
    code, out, err = home.call("ban", first[-8:], *folder)
    assert code == 0, err
    assert f"1: ban {first}" in out
    home.until(lambda: home.status("founder")["members"] == [home.status("founder")["peer"]], "ban")
    code, out, _ = home.call("status", *folder)
    assert f"the founder states, 1: ban {first}" in out
