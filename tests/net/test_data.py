"""Prepared data in real processes: joiners without any of it fetch what they draw and train on it,
others serve what they have while the founder is away, and a node that was killed goes on at the
next sample."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds.node_processes import invite_file
from worlds.prepared import documents_of, prepared

from farflock.node.assembly.text import listed_text
from farflock.node.data.index import read_index
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import PackedBatches
from farflock.node.process.brake import BRAKE
from farflock.node.process.data_supply import AHEAD_STEPS, shards_ahead

pytestmark = [pytest.mark.net, pytest.mark.ci_more, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BATCH, SEQ, SEED = 4, 32, 5
SHARDS = 40  # of two sources
SLOW_S = 0.3  # a step of a slow node
WITHIN_S = 120.0
RUN = f"""
[run]
name = "data"
seed = {SEED}
total_tokens = 100_000_000
[model]
preset = "tiny"
[data]
from = "texts"
mix = {{web = 0.7, code = 0.3}}
[train]
batch = {BATCH}
seq = {SEQ}
[method]
name = "diloco"
[method.options]
period = 10
[exchange]
view_s = 1.0
deadline_s = 10
"""
# A node that notes each batch before it trains on it: its number, and the hash of its tokens.
NOTING = """
import hashlib, sys
from pathlib import Path
from farflock.node.cli import main as cli
from farflock.node.data.sequences import PackedBatches

drawn = PackedBatches.batch

def noted(self, step):
    x, y = drawn(self, step)
    with Path(sys.argv[sys.argv.index("--folder") + 1], "samples.log").open("a") as log:
        log.write(f"{step} {hashlib.sha256(x.numpy().tobytes()).hexdigest()}\\n")
    return x, y

PackedBatches.batch = noted
cli.main()
"""


class NotingNode:
    """A node that notes its samples, in a process of its own, with a cache of its own. It is slow
    as long as `brake` exists."""

    def __init__(self, popen, folder, brake, *words):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        own = {"FARFLOCK_HOME": str(folder / "home"), BRAKE: str(brake)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        command = [sys.executable, "-c", NOTING, *map(str, words), "--folder", str(folder)]
        with (folder / "log.txt").open("ab") as log:
            self.process = popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    @property
    def samples(self):
        """(number, hash) of the batches drawn so far, in all lives."""
        path = self.folder / "samples.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def until(self, condition):
        """Wait for a condition while the process lives."""
        ends_s = time.monotonic() + WITHIN_S
        while not condition():
            said = (self.folder / "log.txt").read_text()[-2000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < ends_s, said
            time.sleep(0.1)

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)

    def status(self, name):
        path = self.folder / "status.json"
        return json.loads(path.read_text())[name] if path.exists() else ""

    def shards(self, root):
        """The hashes of the shards that it has fetched, those that are held out too."""
        return {path.stem for path in (self.folder / "home/data" / root / "shards").glob("*.bin")}


class Drawn:
    """What a peer draws, as the pure function says."""

    def __init__(self, texts, root, peer):
        local = LocalData(root, [texts], texts / "unused")
        index = read_index(local.index_bytes(), "it", root)
        text = listed_text(index, local, {"web": 0.7, "code": 0.3})
        self.stream = PackedBatches(text, SEED, peer, BATCH, SEQ)
        sources = index.sources.values()
        self.held_out = {shard.sha256 for source in sources for shard in source.held_out}

    def batch(self, step):
        return hashlib.sha256(self.stream.batch(step)[0].numpy().tobytes()).hexdigest()

    @property
    def first_shards(self):
        """The hashes of those that are fetched at first."""
        return {shard.sha256 for shard in shards_ahead(self.stream, 0)}


def killed_and_started_again(node, again, drawn):
    """Check that a node goes on at the next sample in its next life; return that."""
    node.end(signal.SIGKILL)
    first = node.samples
    later = again()
    later.until(lambda: len(later.samples) > len(first) + 20)
    lives = later.samples[: len(first)], later.samples[len(first) :]
    # The batch in which it was killed taught nobody anything: it may come again, no other may.
    assert lives[1][0][0] in (lives[0][-1][0], lives[0][-1][0] + 1)
    for life in lives:
        numbers = [number for number, _ in life]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all(drawn.batch(number) == digest for number, digest in life)
    return later


@pytest.fixture
def start(nursery, tmp_path):
    """Starts nodes, the first of which founds the run; kills them at the end."""
    brake, nodes = tmp_path / "brake", []
    brake.write_text(str(SLOW_S))

    def started(name, *words):
        nodes.append(NotingNode(nursery.popen, tmp_path / name, brake, *words))
        return nodes[-1]

    yield started
    for node in nodes:
        if node.process.poll() is None:
            node.end(signal.SIGKILL)


def test_joiners_fetch_what_they_draw_and_need_no_founder_for_it(start, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    sources = {"web": documents_of(1200), "code": documents_of(600, seed=50_000)}
    root = prepared(texts, sources, shards=SHARDS // 2)
    (tmp_path / "run.toml").write_text(RUN)
    founder = start("founder", "run", tmp_path / "run.toml")
    founder.until((founder.folder / "invite.txt").exists)
    invite = founder.folder / "invite.txt"
    joiners = [start(name, "join", invite) for name in ("one", "two")]
    drawn = []
    for joiner in joiners:
        joiner.until(lambda joiner=joiner: len(joiner.samples) > 3)
        drawn.append(Drawn(texts, root, joiner.status("peer")))
    # Until a quarter of what was looked ahead is trained on, nothing else is fetched.
    for joiner, its in zip(joiners, drawn, strict=True):
        joiner.until(lambda joiner=joiner, its=its: joiner.shards(root) >= its.first_shards)
        assert joiner.shards(root) - its.held_out == its.first_shards
        assert len(joiner.samples) < AHEAD_STEPS // 4
        assert len(its.first_shards) < SHARDS
    (tmp_path / "brake").unlink()
    joiners = [
        killed_and_started_again(joiner, lambda name=name: start(name, "join", invite), its)
        for name, joiner, its in zip(("one", "two"), joiners, drawn, strict=True)
    ]
    for joiner in joiners:
        joiner.until(lambda joiner=joiner: len(joiner.shards(root) - drawn[0].held_out) == SHARDS)
    founder.end()
    third = start("third", "join", invite_file(tmp_path, joiners[0].status("invite")))
    third.until(lambda: len(third.samples) > 20)
    its = Drawn(texts, root, third.status("peer"))
    third.until(lambda: third.shards(root) >= its.first_shards)
    assert all(its.batch(number) == digest for number, digest in third.samples)
