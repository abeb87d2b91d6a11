"""The status file: what a node does now and whom it waits for, for `farflock status` and the live view.

The node writes it once a second (node/process/node_process.py)."""

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
    """An exchange that is open: for whom, and for how long still."""

    stream: str
    round: int
    whom: tuple[str, ...]
    left_s: float

    def said(self, names: Mapping[str, str]) -> str:
        """Who is waited for, in what, and how long still: a round that is late stays open while training goes on."""
        whom = ", ".join(names.get(peer, peer[-8:]) for peer in self.whom) or "the decision"
        left = f"{self.left_s:.0f} s left" if self.left_s > 0 else f"{-self.left_s:.0f} s late, training goes on"
        return f"{whom} ({self.stream}, round {self.round}, {left})"


class Status(msgspec.Struct, frozen=True):
    """One node at one moment. Bytes are those of the links, both ways, since the start; `rounds` are those applied here
    since then, by status; `tokens_per_s` is this node's own pace; `branch` is name and first round of the one it is on;
    `work` counts what a pipeline's node has done."""

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


def read_status(path: "os.PathLike[str]") -> Status:
    """The status in a file; `OSError` or `msgspec.MsgspecError` if there is none."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Status)


def is_node(pid: int) -> bool:
    """Whether a process of ours has this number; another program may have it by now."""
    try:
        return "farflock" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
