"""The lock on a node's folder: it lets no second node in, and tells which process the node is.

A running node holds an exclusive flock on `node.lock`, whose content is its pid. The system frees
the lock of a process that ends. A pid counts only while that process has the file open: between
the lock and the new pid a reader finds that of the last node, and by then another program may have
the number.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farflock.node.errors import Failure
from farflock.node.state.paths import NO_LINK, OWNER_ONLY, RunFolder

if TYPE_CHECKING:
    import psutil

# Between attempts: a command that looks for the node holds the lock for a moment, and a node that
# starts needs one to write its pid.
ATTEMPT_WAITS_S = (0.05, 0.1, 0.2)
_PID_BYTES = 20


@dataclass(frozen=True, slots=True)
class NodeHere:
    """The node that runs in a folder; `process` is None if it cannot be seen from here, as in
    another container."""

    process: "psutil.Process | None"

    @property
    def pid(self) -> int | None:
        """The node's process id, as far as it is known."""
        return None if self.process is None else int(self.process.pid)


@contextlib.contextmanager
def only_node_in(folder: RunFolder) -> Iterator[None]:
    """Be the node of this folder while the block runs; raise `Failure` if another one is."""
    folder.make()
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | NO_LINK, OWNER_ONLY)
    try:
        if not _locks(descriptor, fcntl.LOCK_EX):
            raise _taken(folder.path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def node_in(folder: Path) -> NodeHere | None:
    """Return the node that runs in this folder; None if there is none."""
    path = RunFolder(folder).lock
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_LINK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if _locks(descriptor, fcntl.LOCK_SH):
            return None
        return NodeHere(_holder(descriptor))
    finally:
        os.close(descriptor)


def _locks(descriptor: int, kind: int) -> bool:
    """Return whether this process gets the lock, within some attempts."""
    for wait_s in (*ATTEMPT_WAITS_S, None):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        if wait_s is not None:
            time.sleep(wait_s)
    return False


def _holder(descriptor: int) -> "psutil.Process | None":
    """Return the process whose pid is in a locked file, if it has that file open."""
    import psutil

    try:
        process = psutil.Process(int(os.pread(descriptor, _PID_BYTES, 0)))
        held = os.fstat(descriptor)
        for file in process.open_files():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(file.path), held):
                    return process
    except (ValueError, OverflowError, psutil.Error):
        pass
    return None


def _taken(folder: Path) -> Failure:
    here = node_in(folder)
    pid = None if here is None else here.pid
    return Failure(
        f"another node runs in {folder}",
        "" if pid is None else f"it is process {pid}",
        f"stop that one with `farflock leave --folder {folder}`, or name another --folder",
    )
