"""Files that are on the disk once they are written, whole: a power cut leaves the old one or the
new one."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file in place of the one before, and wait until it is on the disk. Two processes may
    do so at once."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(folder: Path, waits: bool = False) -> Iterator[None]:
    """Keep out other processes that lock the folder too, and wait until they have gone, or raise
    `BlockingIOError` if this does not wait."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(place)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; an fsync of the files alone does not do
    this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
