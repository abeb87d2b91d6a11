"""Start and join a run as people see it: the view on a terminal, plain lines elsewhere, files."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from worlds.waiting import LIMIT_S, completed, ended, output_of, told, until_real

from farflock.node.model.corpus import load_corpus
from farflock.node.process.brake import BRAKE
from farflock.node.run.manifest import resolve
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
RUN = """
[run]
name = "join"
total_tokens = 40_000
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
start_peers = 2
"""
COMMAND = (sys.executable, "-m", "farflock.node.cli")
WITHOUT_DAEMON = (
    sys.executable,
    "-c",
    "import sys\n"
    "from hivemind.p2p import p2p_daemon\n"
    "p2p_daemon.P2PD_FILENAME = 'gone'\n"
    "from farflock.node.cli.main import main\n"
    "main(sys.argv[1:])",
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "160"}


@pytest.fixture(autouse=True)
def slow_steps(tmp_path, monkeypatch):
    """A status comes once a second, so no machine may train all tokens within one."""
    (tmp_path / "brake").write_text("0.01")
    monkeypatch.setenv(BRAKE, str(tmp_path / "brake"))


def on_a_terminal(popen, command, out):
    """Run a command whose standard error is a terminal: what that showed, and the process."""
    ours, theirs = pty.openpty()
    process = popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=theirs,
        env=os.environ | ENVIRONMENT,
    )
    os.close(theirs)
    shown = b""
    try:
        # a terminal that no process holds any more cannot be read
        with contextlib.suppress(OSError):
            while select.select([ours], [], [], LIMIT_S)[0]:
                shown += os.read(ours, 65536)
        ended(process, "the command")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()), process.returncode


@pytest.fixture
def founder(nursery, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    command = [
        *COMMAND,
        "run",
        str(tmp_path / "run.toml"),
        "--folder",
        str(tmp_path / "a"),
        "--json",
    ]
    with (tmp_path / "err.txt").open("wb") as err:
        process = nursery.popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, env=os.environ | ENVIRONMENT
        )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def invite_of(process, folder):
    log = folder.parent / "err.txt"

    def is_there():
        assert process.poll() is None, told("the founder", process, log)
        return (folder / "invite.txt").exists()

    until_real(is_there, "the invite", lambda: told("the founder", process, log))
    return (folder / "invite.txt").read_text().strip()


def from_outside(run, invite, folder):
    """A run looked at by its invite: its members and their answers; it is not joined."""
    command = [*COMMAND, "status", invite, "--folder", str(folder / "c"), "--json"]

    def answered():
        """A member that is slow to answer is shown without its answer."""
        looked = completed(command, run, cwd=ROOT, capture_output=True, check=True)
        seen = json.loads(looked.stdout)
        return seen if seen["members"][0]["answers"] else None

    seen = until_real(answered, "the founder's answer")
    (member,) = seen["members"]
    assert (seen["view"], seen["branch"]) == (0, None)
    assert member["addresses"][0].startswith("/ip4/127.0.0.1/tcp/")
    assert "[method]" in seen["manifest"]
    assert not (folder / "c").exists()


@pytest.mark.ci_more
def test_two_peers_train_one_shows_it_on_a_terminal_the_other_in_lines_and_both_leave_their_books(
    nursery, founder, tmp_path
):
    invite = invite_of(founder, tmp_path / "a")
    waiting = completed(
        [*COMMAND, "status", "--folder", str(tmp_path / "a")],
        nursery.run,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "waits for members: 1 of 2 are here" in waiting.stdout
    assert "no step yet" in waiting.stdout
    from_outside(nursery.run, invite, tmp_path)

    with (tmp_path / "out.txt").open("wb") as out:
        shown, code = on_a_terminal(
            nursery.popen,
            [*COMMAND, "join", invite, "--folder", str(tmp_path / "b"), "--json"],
            out,
        )
    assert code == 0
    for word in (
        "farflock join: run",
        "tokens/s",
        "latency",
        "direct",
        "loss ",
        "sent ",
        "of 40.0k tokens",
    ):
        assert word in shown, shown[-3000:]
    assert "Traceback" not in shown
    facts = json.loads((tmp_path / "out.txt").read_text().splitlines()[-1])
    assert facts["ended"] == "done"
    assert (Path(facts["checkpoint"]) / "config.json").exists()

    out = output_of(founder, "the founder", lambda: (tmp_path / "err.txt").read_text()[-2000:])
    assert founder.returncode == 0
    assert json.loads(out.splitlines()[-1])["ended"] == "done"
    lines = (tmp_path / "err.txt").read_text().splitlines()
    assert any(f"farflock join {invite}" in line for line in lines)
    assert any(re.search(r"farflock run: .{8} joined", line) for line in lines)
    assert sum("tokens/s" in line and "loss" in line for line in lines) >= 2
    assert not any("\x1b" in line for line in lines)

    contributions = {
        name: [json.loads(line) for line in (tmp_path / name / "receipts.jsonl").open()]
        for name in "ab"
    }
    together = {
        name: {entry["round"]: entry for entry in entries if len(entry["participants"]) == 2}
        for name, entries in contributions.items()
    }
    both = together["a"].keys() & together["b"].keys()
    assert both, "no round was of both"
    for number in both:
        mine, theirs = together["a"][number], together["b"][number]
        assert {name: mine[name] for name in ("participants", "tokens", "status")} == {
            name: theirs[name] for name in ("participants", "tokens", "status")
        }
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert status["doing"].startswith("has ended: the checkpoint is in ")
    assert sum(entry["sent_bytes"] for entry in contributions["a"]) <= status["sent_bytes"]
    assert min(entry["sent_bytes"] for entry in together["a"].values()) > 0
    assert sum(status["rounds"].values()) == len(contributions["a"])
    over = completed(
        [*COMMAND, "status", "--folder", str(tmp_path / "a"), "--json"],
        nursery.run,
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert json.loads(over.stdout)["running"] is False


@pytest.mark.ci_more
def test_a_joiner_gets_the_tokenizer_from_the_swarm_and_keeps_it_with_its_checkpoint(
    nursery, tmp_path
):
    raw = train_tokenizer([load_corpus("shakespeare").train[:20_000]], 400)
    (tmp_path / "tok.json").write_bytes(raw)
    tokenizer = f'[data]\ntokenizer = "{tmp_path}/tok.json"\n'
    (tmp_path / "run.toml").write_text(RUN.replace("40_000", "10_000") + tokenizer)
    homes = {
        name: os.environ | ENVIRONMENT | {"FARFLOCK_HOME": str(tmp_path / name)} for name in "ab"
    }
    quiet = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    folder = tmp_path / "a" / "node"
    founded = [*COMMAND, "run", str(tmp_path / "run.toml"), "--folder", str(folder), "--json"]
    founder = nursery.popen(founded, env=homes["a"], **quiet)
    invite = invite_of(founder, folder)
    (tmp_path / "tok.json").unlink()
    joining = [*COMMAND, "join", invite, "--json"]
    joined = completed(joining, nursery.run, env=homes["b"], check=True, **quiet)
    output_of(founder, "the founder")
    assert founder.returncode == 0
    checkpoint = Path(json.loads(joined.stdout.splitlines()[-1])["checkpoint"])
    assert (checkpoint / "tokenizer.json").read_bytes() == raw
    name = JsonTokenizer(raw).hash
    assert (tmp_path / "b" / "tokenizers" / f"{name}.json").read_bytes() == raw
    told = [*COMMAND, "generate", str(checkpoint), "--tokens", "5", "--json"]
    said = completed(told, nursery.run, env=homes["b"], check=True, **quiet)
    assert json.loads(said.stdout)["text"]


@pytest.mark.ci_more
def test_a_node_whose_directorys_daemon_is_missing_is_a_member_and_says_what_it_lacks(run):
    run.brake(0.05)
    founder = run.found(resolve(tomllib.loads(RUN.replace("40_000", "100_000_000"))))
    lost = run.join("lost", command=WITHOUT_DAEMON)
    status = lost.reaches(
        lambda status: status["is_member"] and "without the run's directory" in status["doing"]
    )
    assert status["doing"].startswith("trains")
    assert len(founder.reaches(lambda status: len(status["members"]) == 2)["members"]) == 2
    lost.reaches(lambda later: later["tokens"] > status["tokens"])
    lost.leaves()
    founder.leaves()
