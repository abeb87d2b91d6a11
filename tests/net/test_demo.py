"""The demo with real processes, small: everything that a newcomer sees first, and once for each
method of the catalogue."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from farflock.node.process.status import Status, read_status
from farflock.optimizers.catalog import METHODS

pytestmark = pytest.mark.net

FIELDS = {
    "held_out_loss",
    "ddp_loss",
    "none_loss",
    "share_of_gain",
    "bytes_per_peer",
    "ddp_bytes_per_peer",
    "peers_killed",
    "peers_joined",
    "checkpoint",
    "sample",
}


def demo(folder: Path, timeout_s: float, *words: str) -> dict[str, object]:
    """The facts on the last line of `farflock demo`."""
    command = [sys.executable, "-m", "farflock.node.cli", "demo", *words]
    done = subprocess.run(
        [*command, "--json", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def left_behind(folder: Path) -> list[int]:
    """Processes that name this demo's folder on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = str(folder) in " ".join(process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process.pid)
    return found


# 60 steps per peer would be over before a newcomer has started, if the peers did not wait for it.
@pytest.mark.ci_more
@pytest.mark.timeout(400)
@pytest.mark.parametrize("steps", [60, 260])
def test_the_demo_trains_a_real_swarm_loses_a_peer_admits_one_and_leaves_nothing_behind(
    tmp_path: Path, steps: int
):
    facts = demo(tmp_path, 380, "--peers", "3", "--steps", str(steps))
    assert facts.keys() >= FIELDS
    assert facts["peers_killed"] == 1
    assert facts["peers_joined"] == 1
    assert facts["held_out_loss"] < facts["unigram_loss"] < facts["untrained_loss"]
    assert 0 < facts["bytes_per_peer"] < facts["ddp_bytes_per_peer"]
    assert (Path(facts["checkpoint"]) / "config.json").exists()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "loss.svg").stat().st_size < 200_000
    assert "event: newcomer invited" in (tmp_path / "loss.csv").read_text()
    assert len(facts["sample"]) >= 150
    assert not left_behind(tmp_path)


def said(folder: Path, peer: str) -> Status:
    """A peer's last status."""
    return read_status(folder / peer / "status.json")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_it_learns_loses_a_peer_takes_one_in_and_exchanges_with_others(method, tmp_path):
    facts = demo(tmp_path, 580, "--method", method, "--peers", "2", "--steps", "220")
    assert facts["held_out_loss"] < facts["untrained_loss"] - 1
    assert (facts["peers_killed"], facts["peers_joined"]) == (1, 1)
    assert facts["bytes_per_peer"] > 0
    founder, newcomer = said(tmp_path, "founder"), said(tmp_path, "newcomer")
    assert founder.tokens >= founder.total_tokens
    assert newcomer.step > 0
    together = founder.rounds.get("ok", 0) + founder.rounds.get("partial", 0)
    assert (together > 0) == (method != "local")
    assert not left_behind(tmp_path)
