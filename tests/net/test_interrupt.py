"""Ctrl-C and SIGTERM end a node and the demo within seconds, and no process, port or file stays."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from worlds.waiting import alive, ended, output_of, told, until_real

from farflock.node.run.invite import Invite, founder_of, mint
from farflock.swarm.contact import Contact

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
RUN = """
[run]
name = "interrupt"
total_tokens = 100_000_000
[model]
preset = "tiny"
[train]
batch = 2
seq = 16
[method]
name = "diloco"
[method.options]
period = 5
[exchange]
view_s = 2.0
deadline_s = 300.0
start_peers = {peers}
"""
SLOW_SAVE = """
import time
from farflock.node.state import checkpoint
from farflock.node.cli import main as cli

def save(*arguments):
    time.sleep(3600)

checkpoint.save = save
cli.main()
"""
PACED_SAVE = """
import time
from farflock.node.assembly import leaving
from farflock.node.state import checkpoint
from farflock.node.cli import main as cli

put = checkpoint._put

def slow(descriptor, rest):
    time.sleep(0.4)
    put(descriptor, rest)

checkpoint._put, leaving.STALL_S = slow, 2.0
cli.main()
"""
STILL_SAVE = SLOW_SAVE.replace(
    "cli.main()",
    """
from farflock.node.assembly import leaving
leaving.STALL_S = 1.0
cli.main()""",
)
LONG_STEP = """
import sys, time
from farflock.node.train.task import LanguageModelTask
from farflock.node.cli import main as cli

passes = LanguageModelTask._passes

def long(task, step, scale):
    if step == 4:
        print("is in the middle", file=sys.stderr, flush=True)
        time.sleep(3600)
    return passes(task, step, scale)

LanguageModelTask._passes = long
cli.main()
"""
LONG_EVALUATION = """
import sys, time
from farflock.node.train.evaluator import Evaluator
from farflock.node.cli import main as cli

measured = Evaluator._measured

async def long(evaluator, measure):
    def measures(is_over):
        print("is in the middle", file=sys.stderr, flush=True)
        time.sleep(3600)
    return await measured(evaluator, measures if evaluator.loop.step else measure)

Evaluator._measured = long
cli.main()
"""
LONG_COMPILATION = """
import sys, time
from farflock.node.model.compiled import CompiledLayers
from farflock.node.cli import main as cli

def settle(layers, sequences, loss_of):
    print("is in the middle", file=sys.stderr, flush=True)
    time.sleep(3600)

CompiledLayers.settle = settle
cli.main()
"""
LONG_TRIAL = """
import dataclasses, sys, time
from types import SimpleNamespace
from farflock.node.process import room, run_text
from farflock.node.cli import main as cli

fitted, card = room.fitted, SimpleNamespace(place=SimpleNamespace(type="cuda"))

def tried(machine, manifest, error):
    return fitted(dataclasses.replace(machine, device=card), manifest, error)

def fitting(plan, device, options, state_bytes):
    print("is in the middle", file=sys.stderr, flush=True)
    time.sleep(3600)

room.fitting, run_text.fitted = fitting, tried
cli.main()
"""
CLI = ("-m", "farflock.node.cli")


class Started:
    """A command in a session of its own: what a terminal's Ctrl-C reaches is its whole group."""

    def __init__(self, popen, folder, *arguments, how=CLI, **environment):
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "log.txt"
        with self.log.open("wb") as log:
            self.process = popen(
                [sys.executable, *how, *map(str, arguments)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    def status(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "status.json").read_text())
        return None

    def told(self):
        return f"{told(self.folder.name, self.process, self.log)}\nits status: {self.status()}"

    def wait_for(self, reached):
        def met():
            found = reached()
            assert found or self.process.poll() is None, self.told()
            return found

        return until_real(met, "what the test waits for", self.told)

    def reaches(self, condition):
        return self.wait_for(lambda: (status := self.status()) and condition(status) and status)

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def ends(self):
        """Exit code, and the last line of standard output."""
        out = output_of(self.process, self.folder.name, self.told)
        lines = out.decode().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines and lines[-1].startswith(
            "{"
        ) else None

    def traces(self):
        """Processes, socket files and listening ports; all of them must be gone afterwards."""
        family = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        paths, ports = set(), set()
        for each in family:
            with contextlib.suppress(psutil.Error):
                paths |= {Path(unix.laddr) for unix in each.net_connections("unix") if unix.laddr}
                ports |= {
                    tcp.laddr.port
                    for tcp in each.net_connections("tcp")
                    if tcp.status == psutil.CONN_LISTEN
                }
        assert len(family) > 1
        assert ports
        return [each.pid for each in family], {path for path in paths if path.is_absolute()}, ports


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_gone(traces):
    """A process whose first thread is gone may hold its sockets for a moment more."""
    pids, paths, ports = traces

    def left():
        return (
            [*filter(alive, pids)],
            [path for path in paths if path.exists()],
            [*filter(listens, ports)],
        )

    until_real(lambda: not any(left()), "the end of all traces", lambda: str(left()))


@pytest.fixture
def start(nursery, tmp_path):
    """A function that starts a command; at the end each one left is killed with its group."""
    started = []

    def begin(name, *arguments, **options):
        started.append(Started(nursery.popen, tmp_path / name, *arguments, **options))
        return started[-1]

    yield begin
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        ended(each.process, each.folder.name, each.told)
        each.process.stdout.close()


@pytest.fixture
def manifest(tmp_path):
    def write(peers):
        path = tmp_path / "run.toml"
        path.write_text(RUN.format(peers=peers))
        return path

    return write


def test_a_node_that_waits_for_a_silent_partner_ends_at_ctrl_c_with_all_saved(
    start, manifest, tmp_path
):
    founder = start("a", "run", manifest(2), "--folder", tmp_path / "a", "--json")
    invite = founder.reaches(lambda status: status["invite"])["invite"]
    joiner = start("b", "join", invite, "--folder", tmp_path / "b", "--json")
    for each in (founder, joiner):
        each.reaches(lambda status: status["rounds"].get("ok", 0) >= 2)
    # half of the members, the senior one: the other cannot decide alone
    os.kill(founder.process.pid, signal.SIGSTOP)
    waiting = joiner.reaches(
        lambda status: status["waits"] and status["partners"][0]["life"] != "alive"
    )
    assert waiting["waits"][0]["left_s"] > 100
    traces = joiner.traces()
    joiner.signal(signal.SIGINT)
    code, said = joiner.ends()
    assert code == 130
    assert said["ended"] == "left"
    assert (Path(said["checkpoint"]) / "manifest.json").exists()
    assert joiner.status()["doing"].startswith("has ended: the checkpoint is in")
    assert_gone(traces)

    os.kill(founder.process.pid, signal.SIGCONT)
    traces = founder.traces()
    founder.signal(signal.SIGTERM)
    code, said = founder.ends()
    assert (code, said["ended"]) == (0, "left")
    assert_gone(traces)


def test_a_second_ctrl_c_ends_at_once(start, manifest, tmp_path):
    slow = start("a", "run", manifest(1), "--folder", tmp_path / "a", how=("-c", SLOW_SAVE))
    slow.reaches(lambda status: status["step"] > 3)
    pids, _, ports = slow.traces()
    slow.signal(signal.SIGINT)
    slow.reaches(lambda status: status["doing"].startswith("is leaving"))
    time.sleep(0.3)
    assert slow.process.poll() is None
    slow.signal(signal.SIGINT)
    code, _ = slow.ends()
    assert code == -signal.SIGINT
    assert_gone((pids, (), ports))


def test_a_save_that_progresses_is_finished_however_long_it_takes(start, manifest, tmp_path):
    node = start(
        *("a", "run", manifest(1), "--folder", tmp_path / "a", "--json"), how=("-c", PACED_SAVE)
    )
    node.reaches(lambda status: status["step"] > 3)
    began_s = time.monotonic()
    node.signal(signal.SIGTERM)
    node.reaches(lambda status: status["doing"].startswith("is leaving: saves step"))
    code, said = node.ends()
    assert time.monotonic() - began_s > 2.0, "the save was not slow"
    assert (code, said["ended"]) == (0, "left")
    assert (Path(said["checkpoint"]) / "manifest.json").exists()
    assert node.status()["doing"] == f"has ended: the checkpoint is in {said['checkpoint']}"


def test_one_that_stands_still_is_given_up_and_its_thread_does_not_hold_the_end_up(
    start, manifest, tmp_path
):
    node = start(
        *("a", "run", manifest(1), "--folder", tmp_path / "a", "--json"), how=("-c", STILL_SAVE)
    )
    node.reaches(lambda status: status["step"] > 3)
    traces = node.traces()
    node.signal(signal.SIGTERM)
    code, said = node.ends()
    assert (code, said["exit_code"]) == (143, 143)
    assert "is not saved: the disk has taken nothing" in said["error"]
    assert "there is no earlier checkpoint" in said["error"]
    assert_gone(traces)


@pytest.mark.long
@pytest.mark.parametrize("program", [LONG_STEP, LONG_EVALUATION], ids=["step", "evaluation"])
def test_in_the_middle_of_work_without_an_end_the_last_whole_step_is_saved(
    start, manifest, tmp_path, program
):
    path = manifest(1)
    path.write_text(path.read_text() + "[evaluation]\nevery = 1\n")
    node = start("a", "run", path, "--folder", tmp_path / "a", "--json", how=("-c", program))
    node.wait_for(lambda: "is in the middle" in node.log.read_text())
    step = node.reaches(lambda status: status["step"] >= 4)["step"]
    traces = node.traces()
    node.signal(signal.SIGTERM)
    code, said = node.ends()
    assert (code, said["ended"]) == (0, "left")
    assert Path(said["checkpoint"]).name == f"step-{step}"
    assert (Path(said["checkpoint"]) / "manifest.json").exists()
    assert_gone(traces)


@pytest.mark.long
def test_in_the_middle_of_a_compilation_the_weights_that_the_run_begins_with_are_saved(
    start, manifest, tmp_path
):
    arguments = "run", manifest(1), "--folder", tmp_path / "a", "--json", "--compile", "on"
    node = start("a", *arguments, how=("-c", LONG_COMPILATION))
    node.wait_for(lambda: "is in the middle" in node.log.read_text())
    traces = node.traces()
    node.signal(signal.SIGTERM)
    code, said = node.ends()
    assert (code, said["ended"]) == (0, "left")
    assert Path(said["checkpoint"]).name == "step-0"
    assert_gone(traces)


@pytest.mark.long
def test_in_the_middle_of_the_trial_of_what_fits_a_device_there_is_nothing_to_save(
    start, manifest, tmp_path
):
    arguments = "run", manifest(1), "--folder", tmp_path / "a", "--json"
    node = start("a", *arguments, how=("-c", LONG_TRIAL))
    node.wait_for(lambda: "is in the middle" in node.log.read_text())
    node.signal(signal.SIGTERM)
    code, said = node.ends()
    assert (code, said["exit_code"]) == (143, 143)
    assert_gone(([node.process.pid], (), ()))


@pytest.mark.long
def test_a_download_that_is_broken_off_leaves_nothing_and_the_next_one_gets_in(
    start, manifest, tmp_path
):
    path = manifest(1)
    text = path.read_text().replace("period = 5", "period = 600").replace("tiny", "demo")
    path.write_text(text)  # 4 MB, of which 0.6 MB come at once
    founder = start("a", "run", path, "--folder", tmp_path / "a", "--json")
    # after a first round, so that the state is no longer what anyone begins with
    invite = founder.reaches(lambda status: status["step"] > 601)["invite"]
    options = "join", invite, "--folder", tmp_path / "b", "--json", "--down"
    joiner = start("b", *options, "2mbit")

    def begun():
        waits = [wait["download"] for wait in (joiner.status() or {"waits": []})["waits"]]
        return any(each["here_bytes"] > 0 for each in waits if each)

    joiner.wait_for(begun)
    traces = joiner.traces()
    joiner.signal(signal.SIGTERM)
    code, said = joiner.ends()
    assert (code, said["exit_code"]) == (143, 143)
    assert_gone(traces)
    again = start("b", *options, "all")
    again.reaches(lambda status: status["is_member"] and status["step"] > 0)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_one_that_has_not_come_in_yet_breaks_off(start, tmp_path, number, code):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        port = silent.getsockname()[1]
        member = Contact(peer, bytes(32), "127.0.0.1", port, port, port)
        invite = mint(
            Invite("ab" * 16, founder_of(peer), (member,), "a run", int(time.time() + 600))
        )
        joiner = start("b", "join", invite, "--folder", tmp_path / "b", "--json")
        joiner.wait_for(lambda: len(psutil.Process(joiner.process.pid).children()) == 1)
        pids = [
            joiner.process.pid,
            *(child.pid for child in psutil.Process(joiner.process.pid).children()),
        ]
        joiner.signal(number)
        ended, said = joiner.ends()
    assert ended == code
    assert said["exit_code"] == code
    assert_gone((pids, (), ()))


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        pytest.param([signal.SIGTERM], 143, marks=pytest.mark.long),
        ([signal.SIGINT] * 2, 130),
        pytest.param([signal.SIGKILL], -signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_demo_takes_all_its_processes_with_it(start, tmp_path, signals, code):
    passing = tmp_path / "passing"
    passing.mkdir()
    demo = start("d", "demo", "--peers", "2", "--steps", "5000", "--json", TMPDIR=str(passing))

    def trains():
        statuses = list(passing.glob("farflock-demo-*/*/status.json"))
        with contextlib.suppress(ValueError):
            return len(statuses) == 2 and all(
                json.loads(path.read_text())["step"] > 0 for path in statuses
            )

    demo.wait_for(trains)
    traces = demo.traces()
    assert len(traces[0]) >= 5  # the demo, two nodes, two directories
    for number in signals:
        demo.signal(number)
        time.sleep(0.5)
    ended, said = demo.ends()
    assert ended == code
    if code < 0:  # it had no time to clean up, but its nodes hear that it is gone
        assert_gone(traces)
        return
    assert said["exit_code"] == code
    assert_gone(traces if len(signals) == 1 else (traces[0], (), traces[2]))
    assert not list(passing.glob("farflock-*"))
