"""Files that are on the disk once they are written, whole: a power cut leaves the old one or the
new one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class NoLocks(OSError):
    """Raised where the file system of a folder has no locks, as network folders may not."""


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
def locked(folder: Path) -> Iterator[None]:
    """Keep out other processes that lock the folder too. Raise `BlockingIOError` while another one
    has it (node/turns.py waits for it), or `NoLocks`."""
    import fcntl  # late: every system can import this module

    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            raise NoLocks(error.errno, f"the file system has no locks ({error.strerror})") from None
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
