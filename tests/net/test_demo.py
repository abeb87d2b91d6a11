"""The demo with real processes, small: everything that a newcomer sees first."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from worlds.waiting import LIMIT_S, completed

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


def of_this_demo(folder: Path) -> list[psutil.Process]:
    """Processes that name this demo's folder on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        if (
            str(folder) in words
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.pid != os.getpid()
        ):
            found.append(process)
    return found


# 60 steps per peer would be over before a newcomer has started, if the peers did not wait for it.
@pytest.mark.ci_more
@pytest.mark.timeout(4 * LIMIT_S + 20)  # a whole demo, of many waits
@pytest.mark.parametrize("steps", [60, 260])
def test_the_demo_trains_a_real_swarm_loses_a_peer_admits_one_and_leaves_nothing_behind(
    tmp_path: Path, steps: int
):
    command = [
        sys.executable,
        "-m",
        "farflock.node.cli",
        "demo",
        "--peers",
        "3",
        "--steps",
        str(steps),
        "--json",
    ]
    done = completed(
        [*command, "--folder", str(tmp_path)],
        limit_s=4 * LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
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
    assert not of_this_demo(tmp_path)
