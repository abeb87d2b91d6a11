"""The demo with real processes, small: everything that a newcomer sees first."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from msgspec import structs

from farflock.node.cli import main as cli
from farflock.node.demo import demo, report
from farflock.node.process.brake import BRAKE
from farflock.node.run import manifest

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
    """Processes that have this demo's folder in their environment: its peers' directories."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if str(folder) in (process.info["environ"] or {}).get(BRAKE, "")
    ]


@pytest.fixture
def peers(monkeypatch, nursery):
    """The processes of a demo's peers, as forks, with little to do, and short
    waits."""
    started = []

    def popen(command, **options):
        started.append(nursery.popen(command, **options))
        return started[-1]

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    monkeypatch.setattr(demo, "MIN_RUN_S", 5.0)
    monkeypatch.setattr(demo, "STOPPED_S", 2.0)
    monkeypatch.setattr(report, "HELD_OUT_SEQUENCES", 100)
    monkeypatch.setattr(manifest, "demo_manifest", with_small_batches)
    return started


def with_small_batches(method: str, peers: int, steps: int, whole=manifest.demo_manifest):
    """The demo's manifest with a quarter of its tokens."""
    made = whole(method, peers, steps)
    return structs.replace(
        made,
        run=structs.replace(made.run, total_tokens=made.run.total_tokens // 4),
        train=structs.replace(made.train, batch=4, seq=32),
    )


# 60 steps per peer would be over before a newcomer has started, if the peers did not wait for it.
@pytest.mark.ci_more
@pytest.mark.parametrize("steps", [60, pytest.param(260, marks=pytest.mark.long)])
def test_the_demo_trains_a_real_swarm_loses_a_peer_admits_one_and_leaves_nothing_behind(
    tmp_path: Path, capfd, peers, steps: int
):
    words = ["demo", "--peers", "3", "--steps", steps, "--json", "--folder", tmp_path]
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err[-2000:]
    facts = json.loads(out.splitlines()[-1])
    assert facts.keys() >= FIELDS
    assert facts["peers_killed"] == 1
    assert facts["peers_joined"] == 1
    assert facts["held_out_loss"] < facts["unigram_loss"] < facts["untrained_loss"]
    assert 0 < facts["bytes_per_peer"] < facts["ddp_bytes_per_peer"]
    assert (Path(facts["checkpoint"]) / "config.json").exists()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "loss.svg").stat().st_size < 200_000
    events = (tmp_path / "loss.csv").read_text()
    assert "event: newcomer invited" in events
    assert "event: founder back" in events
    assert len(facts["sample"]) >= 150
    assert len(peers) == 4
    assert all(process.poll() is not None for process in peers)
    assert not of_this_demo(tmp_path)
