"""Paths of files: the user's data folder, and in it (or at `--folder`) the folder of one node.

A node's folder is its owner's alone (0700). It holds `identity.key`, `node.lock`
(node/state/node_lock.py), `status.json`, `run.db`, `events.jsonl` and `receipts.jsonl`
(node/state/history.py), `views.bin`, `votes.bin` and `proofs.bin` (node/state/voting_files.py), and
`checkpoints/step-N/` (node/state/checkpoint.py). Only this module reads FARFLOCK_HOME."""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from farflock.node.errors import Failure, explained

HOME_VARIABLE = "FARFLOCK_HOME"
OWNER_ONLY = 0o600  # the mode of files that hold an invite, a run's only secret
NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC  # flags with which no file outside the folder is opened
_OTHERS = 0o077  # the bits of a mode that let other users in
_OTHERS_WRITE = 0o022
_PARTIAL_TRIES = 3

log = logging.getLogger(__name__)


def home() -> Path:
    """Return the folder of all of Farflock's files: FARFLOCK_HOME, else the user's data folder."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named).expanduser()
    return platformdirs.user_data_path("farflock", appauthor=False)


def data_cache() -> Path:
    """Return the folder of what was downloaded of the data of runs."""
    return home() / "data"


def write_whole(path: Path, content: bytes, mode: int = 0o644, *, lasting: bool = False) -> None:
    """Write a file atomically: a concurrent reader gets the old content or the new, never a
    mixture. No link is followed, neither at `path` nor at the name of the unfinished file.

    With `lasting`, a power cut after the call does not undo it."""
    partial = path.with_suffix(".partial")
    try:
        with os.fdopen(_created(partial, mode), "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if lasting:
            sync(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk, where the system can
    tell. An fsync of the files alone does not keep their names."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _created(path: Path, mode: int) -> int:
    """Return the descriptor of a file that did not exist before. One that a crash has left is
    removed, and so is a link that somebody planted."""
    for _ in range(_PARTIAL_TRIES):
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
        except FileExistsError:
            path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one node. Making this object does not create the folder."""

    path: Path

    @classmethod
    def at(cls, folder: Path | None) -> "RunFolder":
        """Return the named folder, else `node` in the user's data folder."""
        return cls(folder or home() / "node")

    def make(self) -> None:
        """Make the folder, for its owner alone. One that is there already is narrowed to that if
        it is this user's, else refused."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            known, what = explained(error), f"the node's folder {self.path} cannot be created"
            remedy = known.remedy if known else ""
            raise Failure(what, str(error.strerror).lower(), remedy) from None
        try:
            _narrow(self.path, descriptor)
        finally:
            os.close(descriptor)

    @property
    def identity(self) -> Path:
        """The path of the key file."""
        return self.path / "identity.key"

    @property
    def lock(self) -> Path:
        """The path of the file that a running node keeps locked."""
        return self.path / "node.lock"

    @property
    def outer(self) -> Path:
        """The folder of outer state that does not fit into memory."""
        return self.path / "outer"

    @property
    def snapshots(self) -> Path:
        """The folder of snapshots that joiners download."""
        return self.path / "snapshots"

    @property
    def rounds(self) -> Path:
        """The folder of the content of past rounds."""
        return self.path / "rounds"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"


def _narrow(path: Path, descriptor: int) -> None:
    """Close a folder to other users; raise `Failure` if it is not one for a node."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise Failure(
            f"the folder {path} belongs to another user",
            "who could read the node's key and change its files",
            "name a folder of your own with --folder, or change its owner (chown)",
        )
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS:
        return
    if mode & stat.S_ISVTX or path.resolve() in (Path("/"), Path.home()):
        raise Failure(
            f"the folder {path} is not for one node alone",
            f"other users or programs use it too (mode {mode:04o})",
            "name a folder inside it with --folder",
        )
    os.fchmod(descriptor, mode & ~_OTHERS)
    if os.fstat(descriptor).st_mode & _OTHERS:  # as on disks that know no permissions
        log.warning("%s is open to other users of this machine, and its disk keeps it so", path)
    elif mode & _OTHERS_WRITE:
        log.warning(
            "%s is now closed to other users of this machine; some could write to it before"
            " (mode %04o), so look for files that are not yours",
            path,
            mode,
        )
    else:
        log.warning("%s is now closed to other users of this machine (mode was %04o)", path, mode)
