"""Paths of files: the user's data folder, and in it (or at `--folder`) the folder of one node.

A node's folder holds `identity.key` (0600), `status.json`, `run.db`, `events.jsonl` and
`receipts.jsonl` (node/state/history.py), `views` (node/state/kept_views.py), and
`checkpoints/step-N/` (node/state/checkpoint.py). Only this module reads FARFLOCK_HOME."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from farflock.node.errors import Failure, explained

HOME_VARIABLE = "FARFLOCK_HOME"


def home() -> Path:
    """Return the folder of all of Farflock's files: FARFLOCK_HOME, else the user's data folder.

    Beside nodes' folders it holds `tokenizers/`, `prepared/` and `data/`, which are caches. Raise
    `Failure` if it is in the home of a user without one, as in a container."""
    named = os.environ.get(HOME_VARIABLE)
    try:
        if named:
            return Path(named).expanduser()
        found = platformdirs.user_data_path("farflock", appauthor=False)
    except RuntimeError:
        found = Path("~")
    if not found.is_absolute():  # some versions leave `~` as it is
        raise Failure(
            "there is no folder for Farflock's files",
            "this user has no home",
            f"set {HOME_VARIABLE}, or choose a --folder",
        )
    return found


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there; raise `Failure` unless files can be made in it."""
    what = f"the folder {path} cannot be created"
    try:
        path.mkdir(parents=True, exist_ok=True)
        what = f"the folder {path} cannot be used"
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        known = explained(error)
        remedy = known.remedy if known is not None else ""
        raise Failure(what, str(error.strerror).lower(), remedy) from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a concurrent reader gets the old content or the new, never a
    mixture."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one node. Making this object does not create the folder."""

    path: Path

    @classmethod
    def at(cls, folder: Path | None) -> "RunFolder":
        """Return the named folder, else `node` in the user's data folder."""
        return cls(folder or home() / "node")

    @property
    def identity(self) -> Path:
        """The path of the key file."""
        return self.path / "identity.key"

    @property
    def views(self) -> Path:
        """The file of the views that this node knows."""
        return self.path / "views"

    @property
    def terms(self) -> Path:
        """The file of the terms of its run."""
        return self.path / "terms"

    @property
    def records(self) -> Path:
        """The file of the records of the members that this node knew last."""
        return self.path / "records"

    @property
    def ports(self) -> Path:
        """The file of the ports on which this node listened last."""
        return self.path / "ports"

    @property
    def outer(self) -> Path:
        """The folder of outer state that does not fit into memory."""
        return self.path / "outer"

    @property
    def snapshots(self) -> Path:
        """The folder of snapshots that joiners download."""
        return self.path / "snapshots"

    @property
    def download(self) -> Path:
        """The folder of a state that this node downloads, until it is a member."""
        return self.path / "download"

    @property
    def rounds(self) -> Path:
        """The folder of the content of past rounds."""
        return self.path / "rounds"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"
