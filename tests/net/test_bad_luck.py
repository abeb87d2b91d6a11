"""A fault around a node ends it with one sentence and its exit code; its files stay intact."""

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from worlds.waiting import completed, ended, told, until_real

from farflock.node.cli import main as cli
from farflock.node.process import node_process as process
from farflock.node.train.state_sync import StateSync
from farflock.swarm.frame import VERSION
from farflock.swarm.peer.snapshots import Snapshots

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
RUN = """
[run]
name = "luck"
total_tokens = {tokens}
[model]
preset = "tiny"
[data]
corpus = "{corpus}"
[train]
batch = 2
seq = 32
[method]
name = "diloco"
[method.options]
period = 10
[exchange]
view_s = 2.0
start_peers = {peers}
"""
FOUNDER = """
import sys
from pathlib import Path
from farflock.node.cli import main as cli
from farflock.node.train.state_sync import StateSync
from farflock.swarm.peer.snapshots import Snapshot

whole = StateSync._snapshot

async def snapshot(self):
    made = await whole(self)
    if not Path(sys.argv[sys.argv.index("--folder") + 1], "corrupt").exists():
        return made
    chunk = bytearray(made.chunks[0])
    chunk[-1] ^= 1
    return Snapshot(made.round, made.state, made.tokens, (bytes(chunk), *made.chunks[1:]))

StateSync._snapshot = snapshot
cli.main()
"""
LATER_VERSION = """
from farflock.swarm import frame
frame.VERSION += 1
from farflock.node.cli import main as cli
cli.main()
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def outcome(capfd, monkeypatch, tmp_path):
    """A function that runs a command in this process: exit code, and its result or its sentence."""
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(process, "LINGER_S", 0.0)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments), "--json"])
        out, err = capfd.readouterr()
        said = json.loads(out.splitlines()[-1])
        assert said.get("exit_code", 0) == ended.value.code, said
        sentence = said.get("error", "")
        assert f"farflock: {sentence}" in err or not sentence
        assert "bug in Farflock" not in sentence
        assert len(sentence.splitlines()) <= 1
        return ended.value.code, sentence or said

    return run


def written(folder):
    """Every file with its content."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(tokens=1280, corpus="shakespeare", peers=1))
    return path


class Founder:
    """A run that waits for a second peer, for others to join."""

    def __init__(self, popen, folder, corpus, *how):
        folder.mkdir()
        self.folder, self.corpus = folder, corpus
        (folder / "run.toml").write_text(RUN.format(tokens=10**9, corpus=corpus, peers=2))
        command = [sys.executable, *how, "run", str(folder / "run.toml"), "--folder", str(folder)]
        with (folder / "log.txt").open("wb") as log:
            self.process = popen(command, cwd=ROOT, stdout=log, stderr=log, env=ENVIRONMENT)

    def invite(self):
        def is_there():
            assert self.process.poll() is None, self.told()
            return (self.folder / "invite.txt").exists()

        until_real(is_there, "the invite", self.told)
        return (self.folder / "invite.txt").read_text().strip()

    def told(self):
        return told("the founder", self.process, self.folder / "log.txt")

    def end(self):
        self.process.terminate()
        try:
            ended(self.process, "the founder", self.told)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def founder(nursery, tmp_path_factory):
    """A founder with a text file; its snapshots are damaged while its folder holds `corrupt`."""
    folder = tmp_path_factory.mktemp("founder")
    corpus = folder / "text.txt"
    corpus.write_text("All the world's a stage.\n" * 2000)
    made = Founder(nursery.popen, folder / "node", corpus, "-c", FOUNDER)
    yield made
    made.end()


def test_a_dry_run_of_joining_shows_the_manifest_and_its_hash_and_joins_nothing(
    outcome, founder, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, facts = outcome("join", founder.invite(), "--dry-run", "--folder", tmp_path / "b")
    assert code == 0
    _, described = outcome("run", founder.folder / "run.toml", "--dry-run")
    assert {name: facts[name] for name in described} == described
    assert facts["memory_host"] > 0
    assert facts["run"] == json.loads((founder.folder / "status.json").read_text())["run"]
    # torch makes a folder of its own where a process uses it for the first time
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    outcome, founder, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000, total=1_000_000)
    )
    code, sentence = outcome("join", founder.invite(), "--folder", tmp_path / "b")
    assert code == 3
    assert "too large for this machine" in sentence
    assert "and 1 MB are free here" in sentence
    assert "parameters takes about" in sentence


def test_a_damaged_state_is_not_taken_over(outcome, founder, tmp_path, monkeypatch):
    distrust, refused = Snapshots.distrust, []

    def distrusted(self, name):
        """As before; it would wait for another snapshot, until its time is up."""
        distrust(self, name)
        refused.append(name)
        raise TimeoutError

    monkeypatch.setattr(Snapshots, "distrust", distrusted)
    # The run has not begun, and with its weights nothing would be downloaded.
    monkeypatch.setattr(StateSync, "_beginning", lambda self: None)
    invite = founder.invite()
    (founder.folder / "corrupt").touch()
    try:
        code, sentence = outcome("join", invite, "--folder", tmp_path / "b")
    finally:
        (founder.folder / "corrupt").unlink()
    assert (code, len(refused)) == (1, 1)
    assert "state could not be downloaded" in sentence
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_another_text_under_the_same_name_is_refused(outcome, founder, tmp_path):
    invite, text = founder.invite(), founder.corpus.read_text()
    founder.corpus.write_text(text.replace("stage", "state"))
    try:
        code, sentence = outcome("join", invite, "--folder", tmp_path / "b")
    finally:
        founder.corpus.write_text(text)
    assert code == 3
    assert "text.txt has SHA-256" in sentence
    assert "founder" in sentence


def test_a_run_of_another_version_is_refused_at_once(outcome, tmp_path):
    # A process from scratch: modules take the version over when they are imported.
    later = Founder(subprocess.Popen, tmp_path / "a", "shakespeare", "-c", LATER_VERSION)
    try:
        code, sentence = outcome("join", later.invite(), "--folder", tmp_path / "b")
    finally:
        later.end()
    assert (code, sentence) == (
        3,
        f"the run has another protocol: it speaks version {VERSION + 1}, this program version"
        f" {VERSION}; update farflock",
    )


@pytest.mark.parametrize("option", ["--port", "--dht-port"])
def test_a_taken_port_is_named_with_its_remedy(outcome, manifest, tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, sentence = outcome("run", manifest, "--folder", tmp_path / "a", option, port)
    assert code == 1
    assert str(port) in sentence
    assert "choose another port" in sentence


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a disk of this many kilobytes, or a read-only one for 0."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size_kb):
        options = f"size={size_kb}k" if size_kb else "ro"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = completed(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        return place

    yield mount
    completed(["umount", str(place)], check=False, capture_output=True)


def test_a_full_disk_leaves_not_even_half_a_key(outcome, manifest, disk):
    full = disk(64)
    (full / "mine").write_bytes(b"")
    with (
        (full / "mine").open("ab", buffering=0) as file,
        pytest.raises(OSError, match="No space left"),
    ):
        while True:
            file.write(bytes(4096))
    before = written(full)
    code, sentence = outcome("run", manifest, "--folder", full / "a")
    assert code == 1
    assert "No space left on device; free some space" in sentence
    assert written(full) == before


def test_a_disk_that_is_too_small_for_the_checkpoint_says_so_and_keeps_no_part_of_it(
    outcome, manifest, disk
):
    small = disk(224)
    code, sentence = outcome("run", manifest, "--folder", small / "a")
    assert code == 1
    assert "no room on the disk for" in sentence
    assert "step-20" in sentence
    assert not list((small / "a" / "checkpoints").iterdir())


@contextlib.contextmanager
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_must_not_grow_are_like_a_full_disk(outcome, manifest, tmp_path):
    with small_files():
        code, sentence = outcome("run", manifest, "--folder", tmp_path / "a")
    assert code == 1
    assert "cannot be prepared in" in sentence
    assert "file too large; free some space" in sentence
    assert outcome("run", manifest, "--folder", tmp_path / "b")[0] == 0
    with small_files():
        code, sentence = outcome("run", manifest, "--folder", tmp_path / "a")
    assert code == 1
    assert "no room on the disk" in sentence or "history in" in sentence
    assert not list(tmp_path.glob("a/checkpoints/*"))


def test_a_folder_that_must_not_be_written_is_named(outcome, manifest, disk):
    code, sentence = outcome("run", manifest, "--folder", disk(0) / "a")
    assert code == 1
    assert "disk/a cannot be created: read-only file system; give your user" in sentence


def test_a_file_where_a_folder_should_be_is_named_and_kept(outcome, manifest, tmp_path):
    (tmp_path / "a").write_bytes(b"mine")
    code, sentence = outcome("run", manifest, "--folder", tmp_path / "a")
    assert code == 2
    assert "a' is a file" in sentence
    code, sentence = outcome("run", manifest, "--folder", tmp_path / "a" / "b")
    assert code == 1
    assert "a file stands where a folder should be" in sentence
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_damaged_checkpoints_and_those_of_another_run_are_not_written_over(
    outcome, manifest, tmp_path
):
    folder = tmp_path / "a"
    assert outcome("run", manifest, "--folder", folder)[0] == 0
    before = written(folder / "checkpoints")
    code, sentence = outcome("run", manifest, "--folder", folder, "--set", "run.seed=7")
    assert code == 1
    assert "step-20 belongs to another run" in sentence
    assert written(folder / "checkpoints") == before
    (folder / "checkpoints" / "step-20" / "method.safetensors").write_bytes(b"broken")
    before = written(folder / "checkpoints")
    code, sentence = outcome("run", manifest, "--folder", folder)
    assert code == 1
    assert "is intact; restore one from a copy, or move them away" in sentence
    assert written(folder / "checkpoints") == before


def test_a_text_that_is_not_the_manifest_s_ends_the_run_before_it_begins(
    outcome, manifest, tmp_path
):
    code, sentence = outcome(
        "run", manifest, "--folder", tmp_path / "a", "--set", f"data.sha256='{'0' * 64}'"
    )
    assert code == 3
    assert "the corpus shakespeare has SHA-256" in sentence
    assert not (tmp_path / "a" / "checkpoints").exists()
