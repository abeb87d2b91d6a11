"""Baselines of what stays equal on one machine when code only moves, to record before and after.

    python -m farflock.experiments.bench.baselines --short > before.json

Each line is JSON. What `farflock sim` prints is the same bit for bit on one kind of CPU, since its
runs are in virtual time. A demo runs in real time, so only the types of its fields stay. Of a join
over loopback, the sizes of the frames do.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import click
import torch

from farflock.node.cli.main import main as farflock
from farflock.node.cli.output import Output
from farflock.node.process import network
from farflock.node.process.brake import BRAKE
from farflock.node.state.paths import write_whole
from farflock.swarm.frame import message_kind
from farflock.swarm.links import PeerId, Sendable, joined, size_of
from farflock.swarm.zmq.links import ZmqLinks

HERE = "farflock.experiments.bench.baselines"
TAP = "FARFLOCK_BASELINES_TAP"  # names the file for the sizes of frames
RUNS = Path(__file__).parents[1] / "runs"
SIMULATED = {"diloco-16": (16, 131_072), "noloco-64": (64, 262_144), "pipeline": (7, 1_048_576)}
SHORT = 4  # in the short form, the divisor of tokens, seeds and seconds between kills
OF_A_JOIN = {"views?", "views", "join", "state?", "state", "want", "piece"}  # kinds of frames
STEP_S = 0.05  # of a founder that is joined, so that few rounds are under way meanwhile
JOIN_TIMEOUT_S = 120.0
JOINED = """
run = {name = "join", total_tokens = 1_000_000}
model = {preset = "tiny"}
train = {batch = 2, seq = 16}
method = {name = "diloco", options = {period = 10}}
exchange = {view_s = 1.0}
"""


def printed(*words: str) -> dict[str, Any]:
    """Return the JSON that a command of `farflock` prints last."""
    command = [sys.executable, "-m", "farflock.node.cli", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def join_bytes() -> dict[str, list[int]]:
    """Return the sizes of a join's frames at the joiner, by way and kind, until it takes part in a
    round. Those of one kind and size count once: some are repeated until they are answered."""
    with tempfile.TemporaryDirectory(prefix="farflock-baselines-") as kept:
        folder = Path(kept)
        (folder / "run.toml").write_text(JOINED)
        (folder / "brake").write_text(str(STEP_S))
        processes = [_started(folder, "farflock.node.cli", "run", str(folder / "run.toml"))]
        try:
            invite = _written(folder / "run" / "status.json", processes[0])["invite"]
            processes.append(_started(folder, HERE, "join", invite))
            return dict(_written(folder / "sizes.json", processes[1]))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _started(folder: Path, module: str, *words: str) -> subprocess.Popen[bytes]:
    names = {"FARFLOCK_HOME": "home", BRAKE: "brake", TAP: "sizes.json"}
    places = {variable: str(folder / name) for variable, name in names.items()}
    command = [sys.executable, "-m", module, *words, "--folder", str(folder / words[0])]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=none, stderr=none, env={**os.environ, **places})


def _written(file: Path, process: subprocess.Popen[bytes]) -> Any:  # noqa: ANN401 - JSON
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while not file.exists():
        assert process.poll() is None, f"a process ended before it wrote {file.name}"
        assert time.monotonic() < until_s, f"no {file.name} after {JOIN_TIMEOUT_S:.0f} s"
        time.sleep(0.1)
    return json.loads(file.read_text())


class TappedLinks(ZmqLinks):
    """Links that write the sizes of a join's frames once they send the first offer of a round."""

    sizes: ClassVar[defaultdict[str, set[int]]] = defaultdict(set)

    def send(self, peer: PeerId, frame: bytes) -> bool:
        self._note("sent", frame)
        return super().send(peer, frame)

    async def send_bulk(self, peer: PeerId, frame: Sendable, timeout_s: float) -> bool:
        self._note("sent", frame)
        return await super().send_bulk(peer, frame, timeout_s)

    async def receive(self) -> tuple[PeerId, bytes | memoryview]:
        peer, frame = await super().receive()
        self._note("received", bytes(frame))
        return peer, frame

    def _note(self, way: str, frame: Sendable) -> None:
        kind, file = message_kind(joined(frame)).decode(), Path(os.environ[TAP])
        if kind in OF_A_JOIN:
            self.sizes[f"{way} {kind}"].add(size_of(frame))
        elif (way, kind) == ("sent", "offer") and not file.exists():
            found = {name: sorted(sizes) for name, sizes in sorted(self.sizes.items())}
            write_whole(file, json.dumps(found).encode())


def cpu() -> str:
    """Return the name of this CPU, as far as it is known, and what torch uses of it."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", file.read_text() if file.exists() else "")
    return f"{named[1] if named else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


@click.command()
@click.option("--short", is_flag=True, help="Take a quarter of all tokens and seeds, and one demo.")
def command(short: bool) -> None:
    """Record the baselines."""
    out, divisor = Output(as_json=True), SHORT if short else 1
    out.result({"cpu": cpu(), "torch": str(torch.__version__)}, "")
    for name, (peers, tokens) in SIMULATED.items():
        size = ("--peers", str(peers), "--set", f"run.total_tokens={tokens // divisor}")
        weather = ("--loss", "0.2", "--churn", str(20 / divisor))
        out.result(printed("sim", str(RUNS / f"{name}.toml"), *size, *weather) | {"run": name}, "")
    out.result(printed("sim", "--chaos", "--seeds", str(160 // divisor)) | {"run": "chaos"}, "")
    out.result({"join": join_bytes()}, "")
    for words in ((), ("--pipeline",))[: 1 if short else 2]:
        facts = printed("demo", *words, "--steps", "60").items()
        out.result({name: type(value).__name__ for name, value in facts} | {"demo": words}, "")


if __name__ == "__main__":
    if TAP not in os.environ:
        command()
    network.ZmqLinks = TappedLinks  # type: ignore[attr-defined]
    farflock()
