"""The files of a run's data that are on this machine: in folders that the user names, and in a
cache that downloads fill.

A folder is only read, and may hold a part of the data. The cache is a prepared folder that grows:
what was used longest ago goes first when it is full. Nothing is used before its hash was checked,
nor is anything of another run's data.

The files of a base (node/data/base_index.py) are kept in the same way, in a cache of their own that
nothing is deleted from. They are large: all that reads a whole file can be ended between pieces.
"""

import collections
import contextlib
import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from farflock.node.data.index import (
    INDEX_NAME,
    PIECE_BYTES,
    AfterPiece,
    BadIndex,
    DataIndex,
    DataShard,
    root_of,
)
from farflock.node.state.paths import NO_LINK, write_whole
from farflock.node.tokens.tokenizer import TokenIds
from farflock.swarm.chunk_store import digest_of

LENT_PIECES = 8  # kept in memory after they were read for others: several ask for the same

log = logging.getLogger(__name__)


class CacheTooSmall(ValueError):
    """A cache with too little room for what the next steps need; the message names the remedy."""


def unwatched(size: int) -> None:
    """Let a file be read to its end."""


class NamedFile(Protocol):
    """A file of the data: its path in a prepared folder, its hash, its size and its pieces."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def size(self) -> int: ...
    def chunks(self) -> Iterator[tuple[bytes, int]]: ...


def partial_of(path: Path) -> Path:
    """Return the path of what has come of a file that is on its way to `path`."""
    return path.with_name(f".{path.name}.partial")


class Arrival:
    """A file on its way into the cache, piece by piece, in any order.

    An earlier download that was broken off is taken up again: its intact pieces count."""

    def __init__(self, path: Path, file: NamedFile, after: AfterPiece = unwatched) -> None:
        self._path, self._file = path, file
        self._partial = partial_of(path)
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self.missing = dict(enumerate(file.chunks()))  # place -> digest and size
        self.here_bytes = 0  # of the pieces that are not missing
        descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | NO_LINK, 0o644)
        self._stream = os.fdopen(descriptor, "r+b")
        try:
            self._take_up(after)
        except BaseException:
            self.close()
            raise

    def _take_up(self, after: AfterPiece) -> None:
        """Find the intact pieces of an earlier download."""
        here = self._stream.seek(0, os.SEEK_END)
        for place, (digest, size) in list(self.missing.items()):
            if place * PIECE_BYTES >= here:
                return
            self._stream.seek(place * PIECE_BYTES)
            if digest_of(self._stream.read(size)) == digest:
                self._note(place)
            after(size)

    def put(self, place: int, piece: bytes | memoryview) -> bool:
        """Write a piece; return False if it is not the one that belongs there."""
        if place not in self.missing or digest_of(piece) != self.missing[place][0]:
            return False
        self._stream.seek(place * PIECE_BYTES)
        self._stream.write(piece)
        self._note(place)
        return True

    def _note(self, place: int) -> None:
        self.here_bytes += self.missing.pop(place)[1]

    def finish(self) -> Path:
        """Put the whole file in its place and return its path. All pieces were checked, and so
        the file is the one that the index lists."""
        assert not self.missing, f"{len(self.missing)} pieces of {self._file.name} are missing"
        self._stream.truncate(self._file.size)
        self.close()
        try:
            self._partial.replace(self._path)
        except FileNotFoundError:
            # Another node of this machine fetched the same file, piece by piece the same bytes.
            if not self._path.exists():
                raise
        return self._path

    def close(self) -> None:
        """Close the file; what has come stays for the next try."""
        self._stream.close()


class LocalData:
    """The files of the data with this root that are on this machine.

    `cache` is the folder of downloads, which takes up to `cache_bytes`."""

    def __init__(
        self, root: str, folders: Sequence[Path], cache: Path, cache_bytes: int | None = None
    ) -> None:
        self.root, self.cache, self.cache_bytes = root, cache / root, cache_bytes
        self._index = b""
        self._folders = (*folders, self.cache)
        self._paths: dict[str, Path] = {}  # of files that are here, by SHA-256
        self._checked: set[str] = set()
        self._places: dict[bytes, tuple[NamedFile, int, int]] = {}  # piece: file, place, size
        self._lent: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()

    def index_bytes(self) -> bytes | None:
        """Return the index of this data if it is here, else None."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                with (folder / INDEX_NAME).open("rb") as stream:
                    raw = stream.read(PIECE_BYTES + 1)
                if root_of(raw) == self.root:
                    self._index = raw
                    return raw
        return None

    def keep_index(self, raw: bytes) -> None:
        """Keep the index in the cache, and for others."""
        self._index = raw
        self.cache.mkdir(parents=True, exist_ok=True)
        if not (self.cache / INDEX_NAME).exists():
            write_whole(self.cache / INDEX_NAME, raw)

    def note(self, files: Iterable[NamedFile]) -> None:
        """Look which of these files are here, so that others can have them."""
        for file in files:
            self.find(file)

    def find(self, file: NamedFile) -> Path | None:
        """Return the path of a file that is here, as far as its size tells; None if it is not."""
        known = self._paths.get(file.sha256)
        if known is not None:
            return known
        for folder in self._folders:
            path = folder / file.name
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size == file.size:
                    self._add(file, path)
                    return path
        return None

    def has(self, file: NamedFile, after: AfterPiece = unwatched) -> bool:
        """Return whether a file is here and has its hash; a false one is forgotten, and deleted if
        it is in the cache. What `after` raises ends the reading."""
        while (path := self.find(file)) is not None:
            if file.sha256 in self._checked:
                return True
            if _sha256(path, after) == file.sha256:
                self._checked.add(file.sha256)
                return True
            log.warning("%s is damaged: its SHA-256 is not its name's; it is not used", path)
            self._drop(file, path)
        return False

    def read(self, file: NamedFile) -> bytes:
        """Return the content of a small file that is here; raise `BadIndex` if it is not."""
        path = self._paths[file.sha256] if self.has(file) else None
        if path is None:
            raise BadIndex(f"{file.name} is not on this machine; download it first")
        return path.read_bytes()

    def opened(self, shard: DataShard, index: DataIndex) -> TokenIds:
        """Map a shard, whose hash is checked when it is first used; raise `BadIndex` if it is not
        here."""
        if not self.has(shard):
            raise BadIndex(
                f"{shard.name} is not on this machine any more; start again, and it is fetched"
            )
        path = self._paths[shard.sha256]
        tokens: TokenIds = np.memmap(path, dtype=index.dtype, mode="r")
        with contextlib.suppress(OSError):  # it may be in a folder that others own
            os.utime(path)
        return tokens

    def arrival(
        self, file: NamedFile, keep: Collection[str] = (), after: AfterPiece = unwatched
    ) -> Arrival:
        """Return the place of a download, after making room for it; the files whose SHA-256 is in
        `keep` stay. Raise `OSError` if the disk is full. What `after` raises ends the search for
        pieces of an earlier download."""
        self.make_room(file.size, keep)
        return Arrival(self.cache / file.name, file, after)

    def arrived(self, file: NamedFile, arrival: Arrival) -> None:
        """Take a file whose pieces are all there."""
        self._add(file, arrival.finish())
        self._checked.add(file.sha256)

    def make_room(self, size: int, keep: Collection[str] = ()) -> None:
        """Delete the shards in the cache that were used longest ago, of whatever run, until `size`
        bytes fit; raise `CacheTooSmall` if all that is left has to stay."""
        if self.cache_bytes is None:
            return
        shards = [(path, path.stat()) for path in self.cache.parent.glob("*/shards/*.bin")]
        left = self.cache_bytes - size - sum(about.st_size for _, about in shards)
        for path, about in sorted(shards, key=lambda each: each[1].st_mtime_ns):
            if left >= 0:
                return
            if path.stem not in keep:
                path.unlink(missing_ok=True)
                self._paths.pop(path.stem, None)
                self._checked.discard(path.stem)
                left += about.st_size
        if left < 0:
            raise CacheTooSmall(
                f"the cache of the run's data in {self.cache.parent} may take"
                f" {self.cache_bytes / 1e6:,.0f} MB, and what the next steps need takes"
                f" {(self.cache_bytes - left) / 1e6:,.0f} MB; give it more with --data-cache"
            )

    def lends(self, digest: bytes) -> bool:
        """Return whether a piece is here, as far as is known without reading it."""
        return digest in self._places or (bool(self._index) and digest.hex() == self.root)

    def lend(self, digest: bytes) -> bytes | None:
        """Return a piece by its BLAKE3 hash if it is here and intact, to serve it to others."""
        if (piece := self._lent.get(digest)) is not None:
            self._lent.move_to_end(digest)
            return piece
        if digest.hex() == self.root:
            return self._index or None
        if digest not in self._places:
            return None
        file, place, size = self._places[digest]
        path = self._paths.get(file.sha256)
        if path is None:
            return None
        try:
            with path.open("rb") as stream:
                stream.seek(place * PIECE_BYTES)
                piece = stream.read(size)
        except OSError:
            piece = b""
        if digest_of(piece) != digest:
            self._drop(file, path)
            return None
        self._lent[digest] = piece
        while len(self._lent) > LENT_PIECES:
            self._lent.popitem(last=False)
        return piece

    def _add(self, file: NamedFile, path: Path) -> None:
        self._paths[file.sha256] = path
        for place, (digest, size) in enumerate(file.chunks()):
            self._places[digest] = file, place, size

    def _drop(self, file: NamedFile, path: Path) -> None:
        """Forget a file that is not what the index lists."""
        self._paths.pop(file.sha256, None)
        self._checked.discard(file.sha256)
        if path.is_relative_to(self.cache):
            path.unlink(missing_ok=True)
        else:
            self._folders = tuple(
                folder for folder in self._folders if not path.is_relative_to(folder)
            )


def _sha256(path: Path, after: AfterPiece) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            after(len(piece))
    return digest.hexdigest()
