"""Finished runs and verdicts, in the user's data folder: no run is made twice, even after Ctrl-C.

`arms/KEY/` holds one run (its job and its outcome), `tables/KEY/` a computed table, `NAME/TIER/`
the last report of a recipe. Files are written atomically.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from farflock.experiments.pipelines.table import Table
from farflock.experiments.reproduce.job import AnyJob, Outcome, key


class Kept(Protocol):
    """A store of finished runs: a folder, or a file (experiments/quality/runs.py)."""

    def find(self, job: AnyJob) -> Outcome | None:
        """Return the outcome of exactly this job, or None."""

    def keep(self, job: AnyJob, outcome: Outcome) -> None:
        """Store an outcome."""

    def kept_at(self, job: AnyJob) -> float:
        """Return the time at which a job in the store was kept, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Everything that `farflock reproduce` keeps; creating a `Shelf` writes nothing."""

    folder: Path

    def find(self, job: AnyJob) -> Outcome | None:
        """Return the outcome of exactly this job; None if it is missing or unreadable."""
        try:
            return msgspec.json.decode((self._arm(job) / "outcome.json").read_bytes(), type=Outcome)
        except (OSError, msgspec.MsgspecError):
            return None

    def keep(self, job: AnyJob, outcome: Outcome) -> None:
        """Store an outcome, together with its job for human readers."""
        folder = self._arm(job)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "job.json", msgspec.json.format(msgspec.json.encode(job), indent=1))
        write(folder / "outcome.json", msgspec.json.encode(outcome))

    def kept_at(self, job: AnyJob) -> float:
        """Return the time at which a job on the shelf was kept, in seconds since 1970."""
        return (self._arm(job) / "outcome.json").stat().st_mtime

    def find_table(self, key: str) -> Table | None:
        """Return the table computed under this key; None if it is missing or unreadable."""
        try:
            return msgspec.json.decode(
                (self.folder / "tables" / key / "table.json").read_bytes(), type=Table
            )
        except (OSError, msgspec.MsgspecError):
            return None

    def keep_table(self, key: str, described: dict[str, Any], table: Table) -> None:
        """Store a table, together with its configuration for human readers."""
        folder = self.folder / "tables" / key
        folder.mkdir(parents=True, exist_ok=True)
        write(
            folder / "computation.json",
            msgspec.json.format(msgspec.json.encode(described), indent=1),
        )
        write(folder / "table.json", msgspec.json.encode(table))

    def place(self, recipe: str, tier: str) -> Path:
        """Return the folder of a recipe's table, plot and verdict; create it if it is missing."""
        folder = self.folder / recipe / tier
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def said(self, recipe: str, tier: str) -> dict[str, Any] | None:
        """Return the last report of a recipe in a tier, or None."""
        try:
            found = msgspec.json.decode((self.folder / recipe / tier / "result.json").read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return found if isinstance(found, dict) else None

    def sections(self) -> dict[tuple[str, str], str]:
        """Return all last reports as docs/reproductions.md sections, except those of tier ci."""
        found = sorted(self.folder.glob("*/*/table.md"))
        return {
            (path.parts[-3], path.parts[-2]): path.read_text()
            for path in found
            if path.parts[-2] in ("cpu", "gpu")
        }

    def _arm(self, job: AnyJob) -> Path:
        return self.folder / "arms" / key(job)


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
