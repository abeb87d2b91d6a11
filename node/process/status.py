"""The status file: what a node is doing and which peers it waits for.

The node writes it once a second (node/process/node_process.py); `farflock status` and the live view
read it.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from farflock.swarm.peer.evaluations import Evaluation


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


class Suspect(msgspec.Struct, frozen=True):
    """A false statement by which a peer has given itself away: what it was, how often it came, and
    when first and last, in Unix seconds."""

    peer: str
    what: str
    times: int
    first_s: int
    last_s: int

    def said(self) -> str:
        """Return who did what how often, as a line."""
        how_often = "once" if self.times == 1 else f"{self.times:,} times"
        return f"{self.peer}  {self.what}, {how_often}"


class EvaluationStatus(msgspec.Struct, frozen=True):
    """A drawn member's measurement of the run on its held-out text (swarm/peer/evaluations.py).
    `loss` is None if it is not finite; a standard error of 0 is unknown."""

    round: int
    by: str
    loss: float | None
    standard_error: float
    sequences: int
    tokens: int
    gradient_norm: float | None = None
    tokens_per_s: float | None = None
    busy: float | None = None

    @classmethod
    def of(cls, value: "Evaluation", by: str) -> "EvaluationStatus":
        """Return a value that this member signed."""
        loss = value.loss if value.outcome == "ok" else None
        extra = value.gradient_norm, value.tokens_per_s, value.busy
        measured = value.standard_error, value.sequences, value.tokens
        return cls(value.round, by, loss, *measured, *extra)

    def said(self) -> str:
        """Return the loss and the round, as a phrase."""
        if self.loss is None:
            return f"not finite at round {self.round}"
        error = f" ± {self.standard_error:.3f}" if self.standard_error else ""
        return f"{self.loss:.3f}{error} at round {self.round}"


class Status(msgspec.Struct, frozen=True):
    """One node at one moment. Bytes are those of the links since the node started, each way, and
    `relayed_bytes` those that it forwarded for others; `rounds` counts the rounds applied since
    then, by status; `tokens_per_s` is this node's own pace; `exchanges` says on which device outer
    state is kept and changed, and which codecs have no version for it (empty: all is on the CPU);
    `branch` is the name and first round of its branch; `work` holds the counters of a pipeline's
    node; `evaluation` is the newest one that is known, `no_evaluation` says why this node makes
    none, and `guard` what the newest one says is wrong; `busy` is the share of the last seconds in
    which it trained, and `flops_per_s` what its pace needs at least; `mfu` is their share of what
    the device can do, where that is known. `suspects` made statements that no honest peer makes;
    `statements` are the founder's, in words. `voters` are the members that vote, and `fragile` says
    whose loss would stop the run while few of them are alive, or that too few are. `view_hash` is
    the newest view's, in hex; empty before one is known."""

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
    evaluation: EvaluationStatus | None = None
    no_evaluation: str = ""
    guard: str = ""
    busy: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    relayed_bytes: int = 0
    suspects: tuple[Suspect, ...] = ()
    statements: tuple[str, ...] = ()
    voters: tuple[str, ...] = ()
    fragile: str = ""
    view_hash: str = ""


def read_status(path: "os.PathLike[str]") -> Status:
    """Return the status in a file; raise `OSError` or `msgspec.MsgspecError` if there is none."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Status)
