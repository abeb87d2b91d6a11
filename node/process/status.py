"""The status file: what a node is doing and which peers it waits for.

The node writes it once a second (node/process/node_process.py); `farflock status` and the live view
read it.
"""

import os
from collections.abc import Mapping

import msgspec
import psutil


class PartnerStatus(msgspec.Struct, frozen=True):
    """Another member, as this node sees it."""

    peer: str
    life: str
    road: str
    rtt_ms: float | None
    role: str = "replica"


class Waiting(msgspec.Struct, frozen=True):
    """An open exchange: the peers it waits for, and the seconds left."""

    stream: str
    round: int
    whom: tuple[str, ...]
    left_s: float

    def said(self, names: Mapping[str, str]) -> str:
        """Return the awaited peers, the round and the time left, as a phrase."""
        whom = ", ".join(names.get(peer, peer[-8:]) for peer in self.whom) or "the decision"
        left = (
            f"{self.left_s:.0f} s left"
            if self.left_s > 0
            else f"{-self.left_s:.0f} s late; training continues"
        )
        return f"{whom} ({self.stream}, round {self.round}, {left})"


class DataStatus(msgspec.Struct, frozen=True):
    """The prepared data of a run at one node. `seen` are the shards that it has read since it
    started; `copies` is how many members beside the founder have each shard, at least, and stops
    counting at the number that is `wanted`. Bytes are those of data alone."""

    roots: tuple[str, ...]
    tokens: int
    shards: int
    here: int
    seen: int
    fetched_bytes: int
    sent_bytes: int
    late: int
    skipped: int
    skipped_tokens: int
    copies: int
    wanted: int
    waits_for: str = ""


class Status(msgspec.Struct, frozen=True):
    """One node at one moment. Bytes are those of the links since the node started, each way;
    `rounds` counts the rounds applied since then, by status; `tokens_per_s` is this node's own
    pace; `exchanges` says on which device outer state is kept and changed, and which codecs have no
    version for it (empty: all is on the CPU); `branch` is the name and first round of its branch;
    `work` holds the counters of a pipeline's node."""

    pid: int
    run: str
    peer: str
    invite: str
    step: int
    tokens: int
    total_tokens: int
    loss: float | None
    view: int
    members: tuple[str, ...]
    is_member: bool
    partners: tuple[PartnerStatus, ...]
    waits: tuple[Waiting, ...]
    sent_bytes: int
    received_bytes: int
    unsure_rounds: int
    dropped: dict[str, int]
    doing: str = "trains"
    rounds: dict[str, int] = {}
    last_round: int | None = None
    tokens_per_s: float | None = None
    branch: tuple[str, int] | None = None
    role: str = "replica"
    work: dict[str, int] = {}
    exchanges: str = ""
    data: DataStatus | None = None


def read_status(path: "os.PathLike[str]") -> Status:
    """Return the status in a file; raise `OSError` or `msgspec.MsgspecError` if there is none."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Status)


def is_node(pid: int) -> bool:
    """Return whether this pid is a Farflock process; another program may have reused it."""
    try:
        return "farflock" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
