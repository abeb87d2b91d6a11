"""The runs of this user on this machine. Each has a folder of its own in the user's data folder,
which is named after the run; nodes with a `--folder` are not among them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farflock.node.errors import Failure, Usage
from farflock.node.process.status import Status, is_node, read_status
from farflock.node.run.invite import Invite, parse
from farflock.node.state.paths import RunFolder, home, make_folder
from farflock.swarm.identity import BadIdentity, Identity
from farflock.swarm.links import PeerId

_START = "start one with `farflock join INVITE`, or name its --folder"
_SEVERAL = "name one of them with --folder; `farflock list` shows them"


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A run in which a node of this user takes part, or did: the folder, the run's id, the last
    status (None: it was never in), and the Unix time of the last sign of it."""

    folder: RunFolder
    run: str
    status: Status | None
    seen_s: float

    @property
    def pid(self) -> int | None:
        """The process of its node; None if there is none now."""
        return self.status.pid if self.status is not None and is_node(self.status.pid) else None

    @property
    def name(self) -> str:
        """The beginning of the run's name, from its invite; nothing if that is not known."""
        with contextlib.suppress(Usage):
            return parse(self.status.invite, 0.0).name if self.status is not None else ""
        return ""


def own_runs() -> list[OwnRun]:
    """Return the runs of this user, the one with the newest sign of life first."""
    # `node` is the folder that versions before this one had for all runs.
    paths = [*(home() / "runs").glob("*"), home() / "node"]
    found = [run for run in map(_read, paths) if run is not None]
    return sorted(found, key=lambda run: (-run.seen_s, run.run))


def _read(folder: Path) -> OwnRun | None:
    """Return the run in a folder; None if there is none."""
    status, path = None, folder / "status.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        status = read_status(path)
    try:
        seen_s = (path if status is not None else folder / "identity.key").stat().st_mtime
    except OSError:
        return None
    run = folder.name if status is None else status.run
    return OwnRun(RunFolder(folder), run, status, seen_s)


def folder_of(run: str) -> RunFolder:
    """Return the folder of a run, which need not be there."""
    known = (own.folder for own in own_runs() if own.run == run)
    return next(known, RunFolder(home() / "runs" / run))


def folder_to_found(run_of: Callable[[PeerId], str]) -> RunFolder:
    """Return the folder of the run that this user has founded with a manifest, or a new one, with
    the founder's key in it. `run_of` returns the run's id by its founder."""
    for own in own_runs():
        with contextlib.suppress(OSError, BadIdentity):
            if run_of(Identity.load(own.folder.identity).peer) == own.run:
                return own.folder
    identity = Identity.generate()
    folder = RunFolder(home() / "runs" / run_of(identity.peer))
    make_folder(folder.path)
    identity.save(folder.identity)
    return folder


def last_folder() -> RunFolder:
    """Return the folder of the node that runs on this machine, or else ran last; raise `Failure`
    if there is none, or if several run."""
    return _last().folder


def last_invite() -> tuple[OwnRun, Invite]:
    """Return the run that this user took part in last, and a way back into it; raise `Usage` if
    there is none, and `Failure` if its node still runs, several do, or no other member is known."""
    if all(own.status is None for own in own_runs()):
        raise Usage("no invite given", "", "paste the word that begins with `farflock:`")
    own = _last()
    if own.pid is not None:
        remedy = "see `farflock status`, or give the invite of another run"
        raise Failure(f"run {own.run} has a node here already", f"process {own.pid}", remedy)
    try:
        return own, parse((own.folder.path / "members.txt").read_text(), 0.0)
    except (OSError, ValueError, Usage):
        remedy = "go on with `farflock run MANIFEST` if you founded it, or give an invite"
        why = "no other member of it is known here"
        raise Failure(f"the last run, {own.run}, cannot be joined again", why, remedy) from None


def _last() -> OwnRun:
    found = [own for own in own_runs() if own.status is not None]
    live = [own for own in found if own.pid is not None]
    if len(live) > 1:
        named = ", ".join(own.run[:8] for own in live)
        raise Failure("several nodes run on this machine", named, _SEVERAL)
    if not found:
        raise Failure(f"no node has run in {home()}", "", _START)
    return (live or found)[0]
