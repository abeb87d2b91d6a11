"""The segments (legs) of a long simulated run on disk: all nodes' checkpoints and the run's totals.

A leg is complete once its `story.json` exists, which is written last and atomically. A leg never
changes; a run started again in the same folder continues after the newest complete leg.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from farflock.node.assembly.checkpoints import SAMPLES
from farflock.node.assembly.node import ReplicaNode
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.errors import Usage
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import Checkpoint, CheckpointError
from farflock.node.state.paths import write_whole

_LEG = re.compile(r"leg-([1-9][0-9]{0,8})")


class SegmentState(msgspec.Struct):
    """The state of a simulated run that passes from leg to leg, apart from its nodes. `losses`
    are pairs of the run's tokens and a loss, `rounds` pairs of a stream and an applied round."""

    legs: int = 0
    births: int = 0
    kills: int = 0
    sent_bytes: int = 0
    virtual_s: float = 0.0
    losses: list[tuple[int, float]] = msgspec.field(default_factory=list)
    rounds: set[tuple[str, int]] = msgspec.field(default_factory=set)


class _Page(msgspec.Struct):
    """`story.json`: the state, the saved peers, and a hash of the run's terms."""

    terms: str
    peers: list[int]
    story: SegmentState


class SegmentStore:
    """The legs of one run in one folder; `terms` are all the values that the run depends on. A step
    takes `accumulate` batches."""

    def __init__(self, folder: Path, terms: str, accumulate: int) -> None:
        self._folder, self._terms = folder, hashlib.sha256(terms.encode()).hexdigest()
        self._accumulate = accumulate

    def newest(self) -> tuple[SegmentState, dict[int, Checkpoint]]:
        """Return the run's state and checkpoints, or a fresh state if there is no leg; raise
        `Usage` if the folder holds another run."""
        for number in sorted(self._numbers(), reverse=True):
            leg = self._folder / f"leg-{number}"
            try:
                page = msgspec.json.decode((leg / "story.json").read_bytes(), type=_Page)
                if page.terms != self._terms:
                    raise Usage(
                        f"{leg} belongs to another run",
                        "its manifest or its network differs",
                        "name another folder, or none",
                    )
                return page.story, self._load(leg, page.peers)
            except (OSError, msgspec.MsgspecError, CheckpointError):
                continue  # cut short: the leg before it is complete
        return SegmentState(), {}

    def save(self, story: SegmentState, nodes: Mapping[int, ReplicaNode]) -> dict[int, Checkpoint]:
        """Write the leg that has just ended. Return it as read back, so that the run continues
        from that."""
        leg = self._folder / f"leg-{story.legs}"
        shutil.rmtree(leg, ignore_errors=True)  # remains of a leg cut short
        for number, node in nodes.items():
            groups, cursors = checkpoint_state(node)
            samples = node.training_task.batches.cursor(node.step * self._accumulate).hex()
            meta: dict[str, object] = {"node": cursors, SAMPLES: samples}
            checkpoint.save(leg / f"peer-{number}", node.step, groups, meta)
        page = _Page(self._terms, sorted(nodes), story)
        write_whole(leg / "story.json", msgspec.json.encode(page, order="sorted"))
        return self._load(leg, page.peers)

    def _numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [
            int(match[1]) for path in self._folder.iterdir() if (match := _LEG.fullmatch(path.name))
        ]

    def _load(self, leg: Path, peers: list[int]) -> dict[int, Checkpoint]:
        found = {number: checkpoint.latest(leg / f"peer-{number}") for number in peers}
        missing = [number for number, saved in found.items() if saved is None]
        if missing:
            raise CheckpointError(
                f"{leg} lacks the checkpoints of peers {missing}; use the leg before it"
            )
        return {number: saved for number, saved in found.items() if saved is not None}
