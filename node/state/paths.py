"""Where files are: the user's data folder, and in it (or where `--folder` says) the folder of one node.

A node's folder holds `identity.key` (0600), `status.json`, `run.db`, `events.jsonl` and `receipts.jsonl`
(node/state/history.py), and `checkpoints/step-N/` (node/state/checkpoint.py). The environment is read here and nowhere
else."""

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

HOME_VARIABLE = "FARFLOCK_HOME"


def home() -> Path:
    """The folder for everything that Farflock keeps: FARFLOCK_HOME, else the platform's folder for a user's data."""
    named = os.environ.get(HOME_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_data_path("farflock", appauthor=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of which nobody ever sees a half: who reads it meanwhile gets what was there before."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one node. Nothing is made by naming it."""

    path: Path

    @classmethod
    def at(cls, folder: Path | None) -> "RunFolder":
        """The named folder, else `node` in the user's data folder."""
        return cls(folder or home() / "node")

    @property
    def identity(self) -> Path:
        """The key file."""
        return self.path / "identity.key"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"
