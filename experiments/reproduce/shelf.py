"""Where finished runs and verdicts are kept, in the user's data folder: a run is never made twice, also after Ctrl-C.

`arms/KEY/` holds one run (its job and its outcome), `tables/KEY/` what was computed, `NAME/TIER/` what was last said of a
recipe. Files appear whole.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from farflock.experiments.pipelines.table import Table
from farflock.experiments.reproduce.job import AnyJob, Outcome, key


class Kept(Protocol):
    """Where finished runs are: a folder, or a file (experiments/quality/runs.py)."""

    def find(self, job: AnyJob) -> Outcome | None:
        """The outcome of exactly this job, if it was run before."""

    def keep(self, job: AnyJob, outcome: Outcome) -> None:
        """Remember it."""

    def kept_at(self, job: AnyJob) -> float:
        """When a job that is here was kept, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Everything that `farflock reproduce` keeps. Nothing is made by naming it."""

    folder: Path

    def find(self, job: AnyJob) -> Outcome | None:
        """The outcome of exactly this job, if it was run before; a file that cannot be read counts as none."""
        try:
            return msgspec.json.decode((self._arm(job) / "outcome.json").read_bytes(), type=Outcome)
        except (OSError, msgspec.MsgspecError):
            return None

    def keep(self, job: AnyJob, outcome: Outcome) -> None:
        """Remember it; the job is written beside it for whoever looks."""
        folder = self._arm(job)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "job.json", msgspec.json.format(msgspec.json.encode(job), indent=1))
        write(folder / "outcome.json", msgspec.json.encode(outcome))

    def kept_at(self, job: AnyJob) -> float:
        """When a job that is here was kept, in seconds since 1970."""
        return (self._arm(job) / "outcome.json").stat().st_mtime

    def find_table(self, key: str) -> Table | None:
        """What was computed under this key before; a file that cannot be read counts as none."""
        try:
            return msgspec.json.decode((self.folder / "tables" / key / "table.json").read_bytes(), type=Table)
        except (OSError, msgspec.MsgspecError):
            return None

    def keep_table(self, key: str, described: dict[str, Any], table: Table) -> None:
        """Remember it, with the configuration beside it for whoever looks."""
        folder = self.folder / "tables" / key
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "computation.json", msgspec.json.format(msgspec.json.encode(described), indent=1))
        write(folder / "table.json", msgspec.json.encode(table))

    def place(self, recipe: str, tier: str) -> Path:
        """The folder of a recipe's table, plot and verdict, made."""
        folder = self.folder / recipe / tier
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def said(self, recipe: str, tier: str) -> dict[str, Any] | None:
        """What was last said of a recipe in a tier."""
        try:
            found = msgspec.json.decode((self.folder / recipe / tier / "result.json").read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return found if isinstance(found, dict) else None

    def sections(self) -> dict[tuple[str, str], str]:
        """What was last said of every recipe, by recipe and tier, as docs/reproductions.md has it; tier ci says nothing."""
        found = sorted(self.folder.glob("*/*/table.md"))
        return {
            (path.parts[-3], path.parts[-2]): path.read_text() for path in found if path.parts[-2] in ("cpu", "gpu")
        }

    def _arm(self, job: AnyJob) -> Path:
        return self.folder / "arms" / key(job)


def write(path: Path, content: bytes) -> None:
    """Replace a file at once."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
