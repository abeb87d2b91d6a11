"""The small demo with real processes, once for each method of the catalogue."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from worlds.waiting import LIMIT_S, completed

from farflock.node.process.status import Status, read_status
from farflock.optimizers.catalog import METHODS

pytestmark = [pytest.mark.net, pytest.mark.long, pytest.mark.timeout(4 * LIMIT_S + 20)]


def demo(method: str, folder: Path) -> dict[str, object]:
    """The facts on the last line of `farflock demo` with this method."""
    command = [
        sys.executable,
        "-m",
        "farflock.node.cli",
        "demo",
        "--method",
        method,
        "--peers",
        "2",
        "--steps",
        "220",
    ]
    done = completed(
        [*command, "--json", "--folder", str(folder)],
        limit_s=4 * LIMIT_S,
        capture_output=True,
        text=True,
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


def said(folder: Path, peer: str) -> Status:
    """A peer's last status."""
    return read_status(folder / peer / "status.json")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_it_learns_loses_a_peer_takes_one_in_and_exchanges_with_others(method, tmp_path):
    facts = demo(method, tmp_path)
    assert facts["held_out_loss"] < facts["untrained_loss"] - 1
    assert (facts["peers_killed"], facts["peers_joined"]) == (1, 1)
    assert facts["bytes_per_peer"] > 0
    founder, newcomer = said(tmp_path, "founder"), said(tmp_path, "newcomer")
    assert founder.tokens >= founder.total_tokens
    assert newcomer.step > 0
    together = founder.rounds.get("ok", 0) + founder.rounds.get("partial", 0)
    assert (together > 0) == (method != "local")
    assert not left_behind(tmp_path)
