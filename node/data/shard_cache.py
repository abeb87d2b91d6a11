"""The shards and indexes that were fetched: files named by their BLAKE3 hash, for all runs of a
machine.

    index/HASH      an index, or a page of one
    shards/HH/HASH  a shard; HH is the beginning of its hash

Several processes may use one cache. A file appears whole, under the name of what it should be, and
is compared with that name each time it is read: one that was cut or altered counts as absent, and
goes. Names are hashes, so no peer has a say in where anything is written.
"""

import contextlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from farflock.node.turns import TurnNeverCame, in_turn
from farflock.swarm.chunk_store import is_intact
from farflock.swarm.messages import MAX_CHUNK_BYTES

PARTIAL = ".partial"
PARTIAL_S = 3600.0  # after which a file that was never finished goes
FRESH_S = 180.0  # a shard that was used so lately is wanted by another process, perhaps
LOOK_BYTES = 256 << 20  # that this process adds before it looks what others have added

log = logging.getLogger(__name__)

_Files = list[tuple[float, int, Path]]  # when a file was last used, its size, its path


class CacheFull(Exception):
    """There is no room for a shard that is not needed."""


class ShardNeeds(NamedTuple):
    """Shards that should not go: those that are about to be read, and those kept for others."""

    wanted: Collection[bytes] = ()
    mine: Collection[bytes] = ()


class ShardCache:
    """A cache in a folder, of at most `max_bytes` of shards; what is about to be read may exceed
    this."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.names: set[bytes] = set()  # of the shards that are here
        self.used_bytes = 0
        self.version = 0  # rises with each change of the names
        self._unseen_bytes = 0
        self._numbers = itertools.count()
        self.look()

    # the index

    def keep_index(self, name: str, raw: bytes) -> None:
        """Keep an index, or a page of one."""
        self._write(self.folder / "index" / name, raw)

    def index(self, name: str) -> bytes | None:
        """Return an index, or a page of one; None if it is not here."""
        return _read(self.folder / "index" / name, bytes.fromhex(name))

    # shards

    def look(self) -> None:
        """Find out what is here: other processes add and remove shards too."""
        files = self._files()
        self.names = {bytes.fromhex(path.name) for _, _, path in files}
        self.used_bytes = sum(size for _, size, _ in files)
        self._unseen_bytes = 0
        self.version += 1

    def require_writable(self) -> None:
        """Raise `OSError` unless files can be added."""
        with self._locked():
            for name in ("index", "shards"):
                (self.folder / name).mkdir(exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder / name):
                    pass

    def read(self, digest: bytes) -> bytes | None:
        """Return a shard; None if it is not here."""
        path = self._path(digest)
        raw = _read(path, digest)
        if raw is None:
            self.names = self.names - {digest}
            self.version += 1
        else:
            self.use([digest])
        return raw

    def use(self, digests: Collection[bytes]) -> None:
        """Note that shards are still needed."""
        for digest in digests:
            with contextlib.suppress(OSError):
                os.utime(self._path(digest))

    def keep(self, digest: bytes, raw: bytes, needs: ShardNeeds) -> None:
        """Keep a shard; others make room for it, those used longest ago first. Raise `CacheFull` if
        it is kept for others only, and there is no room left."""
        if self._unseen_bytes > LOOK_BYTES:
            self.look()
        if self.used_bytes + len(raw) > self.max_bytes:
            try:
                self._make_room(len(raw), needs)
            except TurnNeverCame as reason:
                log.warning("no room is made in the cache of data: %s", reason.strerror)
            if self.used_bytes + len(raw) > self.max_bytes and digest not in needs.wanted:
                raise CacheFull
        self._write(self._path(digest), raw)
        self.names = self.names | {digest}
        self.used_bytes += len(raw)
        self._unseen_bytes += len(raw)
        self.version += 1

    def _make_room(self, size: int, needs: ShardNeeds) -> None:
        with self._locked():
            self.look()
            now_s, wanted, mine = time.time(), set(needs.wanted), set(needs.mine)
            for used_s, file_bytes, path in sorted(self._files()):
                if self.used_bytes + size <= self.max_bytes:
                    break
                digest = bytes.fromhex(path.name)
                if digest in wanted or digest in mine or now_s - used_s < FRESH_S:
                    continue
                path.unlink(missing_ok=True)
                self.used_bytes -= file_bytes
                self.names = self.names - {digest}
            self.version += 1

    def _files(self) -> _Files:
        found: _Files = []
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / "shards"):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for entry in os.scandir(folder.path):
                        _note(entry, found)
        return found

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / "shards" / name[:2] / name

    def _write(self, path: Path, raw: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{next(self._numbers)}{PARTIAL}")
        try:
            partial.write_bytes(raw)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process make room meanwhile: together they would remove too much."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with in_turn(self.folder):
            yield


def _note(entry: "os.DirEntry[str]", found: _Files) -> None:
    """Add a shard to what was found; remove a file that nobody finishes any more."""
    with contextlib.suppress(FileNotFoundError):
        stat = entry.stat(follow_symlinks=False)
        if len(entry.name) == 64 and set(entry.name) <= set("0123456789abcdef"):
            found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        elif entry.name.endswith(PARTIAL) and time.time() - stat.st_mtime > PARTIAL_S:
            os.unlink(entry.path)


def _read(path: Path, digest: bytes) -> bytes | None:
    """Return what a file holds; None, and no file, unless that is what its name says."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CHUNK_BYTES + 1)
    except (FileNotFoundError, PermissionError):
        return None  # or it is another user's
    if is_intact(raw, digest):
        return raw
    path.unlink(missing_ok=True)
    return None
