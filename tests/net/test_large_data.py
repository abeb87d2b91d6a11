"""A run on 50 GB of prepared data, in real processes: a node starts in seconds, in memory that does
not grow with the data, fetches only what it draws from, and goes on at the next sample."""

import hashlib
import itertools
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from farflock.node.assembly.text import listed_text
from farflock.node.data.draws import Draws
from farflock.node.data.index import (
    PIECE_BYTES,
    SHARD_BYTES,
    DataIndex,
    DataShard,
    DataSource,
    listed,
    read_index,
    root_of,
)
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import PackedBatches
from farflock.node.data.shard_writer import write_pages
from farflock.swarm.chunk_store import digest_of

pytestmark = [pytest.mark.net, pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SHARDS = 750
DATA_BYTES = SHARDS * SHARD_BYTES
ROOM_BYTES = 2 * 10**9  # of the disk: what a joiner fetches is not sparse
BLOCK = 4096  # bytes at the end of each shard that are on the disk
END = 255
BATCH, SEQ, SEED = 4, 32, 5
WITHIN_S = 60.0
# It takes about 1 s; to hash all the data, 20 s and more on any processor.
START_CPU_S = 10.0
# A node without any data takes 0.4 GB, most of it torch.
MEMORY_BYTES = DATA_BYTES // 50
RUN = f"""
[run]
name = "large"
seed = {SEED}
total_tokens = 100_000_000
[model]
preset = "tiny"
[data]
from = "texts"
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
# A node that notes each sample that it draws: its number, its shard and its window.
NOTING = """
import sys
from pathlib import Path
from farflock.node.cli import main as cli
from farflock.node.data.draws import Draws

drawn = Draws.draw

def noted(self, number):
    found = drawn(self, number)
    with Path(sys.argv[sys.argv.index("--folder") + 1], "draws.log").open("a") as log:
        log.write(f"{number} {found.shard} {found.window}\\n")
    return found

Draws.draw = noted
cli.main()
"""


def sparse_shard(folder, number, zeros, zero_piece):
    """Write a shard of holes, but for its last block, and return its entry. `zeros` has hashed all
    bytes before that block."""
    block = np.zeros(BLOCK // 2, dtype="<u2")
    block[:3] = number // END, number % END, END
    block[-1] = END
    whole, raw = zeros.copy(), block.tobytes()
    whole.update(raw)
    last_piece = digest_of(bytes(PIECE_BYTES - BLOCK) + raw).hex()
    shard = DataShard(
        sha256=whole.hexdigest(),
        size=SHARD_BYTES,
        pieces=(*[zero_piece] * (SHARD_BYTES // PIECE_BYTES - 1), last_piece),
        tokens=SHARD_BYTES // 2,
        documents=2,
    )
    with (folder / shard.name).open("wb") as file:
        file.truncate(SHARD_BYTES)
        file.seek(SHARD_BYTES - BLOCK)
        file.write(raw)
    return shard


def held_out_shard(folder):
    tokens = np.tile(np.append(np.arange(99), END).astype("<u2"), 100)
    path = folder / "shards" / "held-out"
    path.write_bytes(tokens.tobytes())
    entry = listed(path)
    shard = DataShard(
        sha256=entry.sha256, size=entry.size, pieces=entry.pieces, tokens=len(tokens), documents=100
    )
    path.replace(folder / shard.name)
    return shard


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of 50 GB of prepared data, which takes a few megabytes of the disk."""
    folder = tmp_path_factory.mktemp("large") / "texts"
    (folder / "shards").mkdir(parents=True)
    if shutil.disk_usage(folder).free < ROOM_BYTES:
        pytest.skip(f"needs {ROOM_BYTES / 1e9:.0f} GB of disk space")
    zeros = hashlib.sha256()
    for _ in range((SHARD_BYTES - BLOCK) // BLOCK):
        zeros.update(bytes(BLOCK))
    zero_piece = digest_of(bytes(PIECE_BYTES)).hex()
    shards = []
    for number in range(SHARDS):
        shards.append(sparse_shard(folder, number, zeros, zero_piece))
        if (folder / shards[0].name).stat().st_blocks * 512 > SHARD_BYTES // 2:
            pytest.skip("needs a file system with sparse files")
    assert listed(folder / shards[0].name).sha256 == shards[0].sha256
    source = DataSource(
        documents=2 * SHARDS,
        tokens=sum(shard.tokens for shard in shards),
        pages=write_pages(folder, shards),
        held_out=(held_out_shard(folder),),
    )
    index = DataIndex(vocabulary=256, token_bytes=2, end_of_text=END, sources={"text": source})
    (folder / "index.json").write_bytes(index.encode())
    assert sum(path.stat().st_size for path in folder.rglob("*.bin")) >= 50 * 10**9
    (folder.parent / "run.toml").write_text(RUN)
    return folder


class DrawingNode:
    """A node that notes what it draws, in a process of its own, with a cache of its own."""

    def __init__(self, popen, folder, *words):
        folder.mkdir(exist_ok=True)
        self.folder, self.began_s = folder, time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FARFLOCK_HOME": str(folder / "home")}
        command = [sys.executable, "-c", NOTING, *map(str, words), "--folder", str(folder)]
        with (folder / "log.txt").open("ab") as log:
            self.process = popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def until(self, condition):
        """Wait for a condition while the process lives."""
        ends_s = time.monotonic() + WITHIN_S
        while not condition():
            said = (self.folder / "log.txt").read_text()[-2000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < ends_s, said
            time.sleep(0.05)

    def trains(self):
        """Wait for its first step of this life; return the seconds until then, and those of the
        processor, this process' alone."""
        self.until(self.steps)
        used = psutil.Process(self.process.pid).cpu_times()
        return self.steps()[0] - self.began_s, used.user + used.system

    def steps(self):
        """When the steps of this life were done, as far as they are noted."""
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{self.folder}/run.db?mode=ro", uri=True)) as database,
        ):
            asked = "SELECT time_s FROM metrics WHERE name = 'loss' AND time_s > ? ORDER BY id"
            return [time_s for (time_s,) in database.execute(asked, (self.began_s,))]
        return []

    @property
    def draws(self):
        """(number, shard, window) of each draw so far, in all lives."""
        path = self.folder / "draws.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    @property
    def peak_bytes(self):
        """The most memory that it had, mapped shards included."""
        said = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) * 1024

    @property
    def peer(self):
        return re.search(r'"peer":"(\w+)"', (self.folder / "status.json").read_text())[1]

    def fetched(self):
        """The names of the shards in its cache."""
        return {path.stem for path in self.folder.glob("home/data/*/shards/*.bin")}

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)


@pytest.fixture
def start(nursery, tmp_path):
    """Start nodes, which end with the test, as does what they have fetched."""
    nodes = []

    def started(name, *words):
        nodes.append(DrawingNode(nursery.popen, tmp_path / name, *words))
        return nodes[-1]

    yield started
    for node in nodes:
        if node.process.poll() is None:
            node.end(signal.SIGKILL)
        shutil.rmtree(node.folder / "home", ignore_errors=True)


def started_run(start, texts):
    """Start a founder; return it and the file with its invite."""
    founder = start("founder", "run", texts.parent / "run.toml")
    founder.until((founder.folder / "invite.txt").exists)
    return founder, founder.folder / "invite.txt"


def starts_in_bounds(node):
    took_s, cpu_s = node.trains()
    assert took_s < WITHIN_S
    assert cpu_s < START_CPU_S
    assert node.peak_bytes < MEMORY_BYTES


def all_text(texts):
    """The text as a node with all of it has it."""
    raw = (texts / "index.json").read_bytes()
    local = LocalData(root_of(raw), [texts], texts / "unused")
    assert local.index_bytes() == raw
    return listed_text(read_index(raw, "it"), local, None)


def require_next(node, lives, text):
    """Check that each life of a node draws what the pure function says, one number after another,
    and that each begins where the one before it ended."""
    sizes = [shard.tokens for shard in text.shards["text"]]
    pure = Draws({"text": sizes}, SEQ + 1, SEED, node.peer)
    for life in lives:
        numbers = [number for number, _, _ in life]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert [(drawn.shard, drawn.window) for drawn in map(pure.draw, numbers)] == [
            (shard, window) for _, shard, window in life
        ]
    for life, after in itertools.pairwise(lives):
        # The batch in which it was killed taught nobody anything: it may come again, no other may.
        last, first = life[-1][0] // BATCH, after[0][0]
        assert first in (last * BATCH, (last + 1) * BATCH)


def test_a_node_that_has_50_gb_starts_in_seconds_and_in_bounded_memory(start, texts):
    founder, invite = started_run(start, texts)
    starts_in_bounds(founder)
    joiner = start("joiner", "join", invite, "--data", texts)
    starts_in_bounds(joiner)
    assert not joiner.fetched()
    joiner.until(lambda: len(joiner.draws) > 40 * BATCH)
    for node in (founder, joiner):
        assert node.peak_bytes < MEMORY_BYTES


def test_a_node_without_them_fetches_what_it_draws_from_and_goes_on_at_the_next_sample(
    start, texts
):
    founder, invite = started_run(start, texts)
    joiner = start("joiner", "join", invite)
    starts_in_bounds(joiner)
    joiner.until(lambda: len(joiner.draws) > 40 * BATCH)
    joiner.end(signal.SIGKILL)
    first = joiner.draws
    again = start("joiner", "join", invite)
    starts_in_bounds(again)
    again.until(lambda: len(again.draws) > len(first) + 20 * BATCH)
    founder.end()
    begun = founder.draws
    resumed = start("founder", "run", texts.parent / "run.toml")
    starts_in_bounds(resumed)
    resumed.until(lambda: len(resumed.draws) > len(begun) + 20 * BATCH)

    text = all_text(texts)
    require_next(again, [first, again.draws[len(first) :]], text)
    require_next(resumed, [begun, resumed.draws[len(begun) :]], text)
    stream = PackedBatches(text, SEED, again.peer, BATCH, SEQ)
    held_out = {shard.sha256 for shard in text.index.sources["text"].held_out}
    # Of each source one shard more is fetched than is drawn from, ahead of need.
    near = {shard.sha256 for shard in stream.needed(0, 2 * SHARD_BYTES // (2 * SEQ * BATCH))}
    drawn = {text.shards["text"][shard].sha256 for _, shard, _ in again.draws}
    assert drawn <= again.fetched() - held_out <= near
    assert len(again.fetched() - held_out) == 2
