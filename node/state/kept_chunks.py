"""Chunks of a state that is being downloaded, in files named by their hash, so that a joiner that
starts again goes on where it was.

    download/NAME/HASH

`NAME` is that of a stream's state. A folder holds chunks of one state, each as large as its name
was announced to be, and goes once the peer is a member. Whoever reads a file compares it with its
name, so that one that was cut or altered is fetched again.
"""

import contextlib
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)


class DownloadFolder:
    """The folder of a node's downloads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, name: str) -> "ChunkFolder":
        """Return the place for the chunks of the state with this name, which is this peer's own
        word and not another's."""
        return ChunkFolder(self._path / name.replace("/", "-"))

    @property
    def is_there(self) -> bool:
        """True if anything may be in it."""
        return self._path.exists()

    def clear(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self._path, ignore_errors=True)


class ChunkFolder:
    """Chunks of one state. If the disk takes none any more, no further ones are kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._fails = path, False

    def get(self, digest: bytes, size: int) -> bytes | None:
        """See `KeptChunks`."""
        path = self._path / digest.hex()
        try:
            if path.stat().st_size != size:
                return None
            return path.read_bytes()
        except OSError:
            return None

    def put(self, digest: bytes, body: memoryview) -> None:
        """See `KeptChunks`."""
        path = self._path / digest.hex()
        if self._fails:
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        except OSError as error:
            self._fails = True
            why = error.strerror
            log.warning("the download is not kept for another start: %s: %s", path.parent, why)
            with contextlib.suppress(OSError):
                path.unlink()

    def keep_only(self, digests: Collection[bytes]) -> None:
        """See `KeptChunks`."""
        names = {digest.hex() for digest in digests}
        try:
            others = [path for path in self._path.iterdir() if path.name not in names]
        except OSError:
            return  # there is no such folder yet
        for path in others:
            with contextlib.suppress(OSError):
                path.unlink()
