"""The status file: what a node is doing and which peers it waits for.

The node writes it once a second (node/process/status_writer.py); `farflock status` and the live
view read it.
"""

import os
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import psutil

from farflock.node.sinks.measures import OUTCOMES, Measures
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.swarm.peer.state_download import StateProgress


class PartnerStatus(msgspec.Struct, frozen=True):
    """Another member, as this node sees it. A `twin` has sent the same updates, bit for bit;
    `slow` says what has made it slower than it was: its machine or its line (empty: nothing). Sent
    are bytes to it, of rounds, states and what it fetches; relayed are those that this node has
    forwarded for it."""

    peer: str
    life: str
    road: str
    rtt_ms: float | None
    role: str = "replica"
    twin: bool = False
    slow: str = ""
    sent_bytes: int = 0
    relayed_bytes: int = 0


class DownloadStatus(msgspec.Struct, frozen=True):
    """A state that a node downloads: the verified bytes and all, the rate of the last seconds, the
    seconds that are left at this rate (None: nothing comes), and the share of the line that the
    run's rounds take (0: not known)."""

    here_bytes: int
    total_bytes: int
    bytes_per_s: float
    left_s: float | None
    rounds_share: float = 0.0

    def said(self) -> str:
        """Return how far it is, as a phrase."""
        if not self.total_bytes:
            return "members are asked for it"
        here = f"{self.here_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB"
        if self.left_s is None:
            return f"{here}, and nothing comes"
        left = timedelta(seconds=round(self.left_s))
        said = f"{here}, {self.bytes_per_s / 1e6:,.2f} MB/s, about {left} left"
        busy = self.rounds_share
        return f"{said}; rounds take {busy:.0%} of this line" if busy else said


class Waiting(msgspec.Struct, frozen=True):
    """An open exchange: the peers it waits for, and the seconds left; or the `download` of a state,
    which has no round and no deadline."""

    stream: str
    round: int
    whom: tuple[str, ...]
    left_s: float
    download: DownloadStatus | None = None

    def said(self, names: Mapping[str, str]) -> str:
        """Return the awaited peers, the round and the time left, as a phrase."""
        if self.download is not None:
            return f"the run's state: {self.download.said()}"
        whom = ", ".join(names.get(peer, peer[-8:]) for peer in self.whom) or "the decision"
        left = (
            f"{self.left_s:.0f} s left"
            if self.left_s > 0
            else f"{-self.left_s:.0f} s late; training continues"
        )
        return f"{whom} ({self.stream}, round {self.round}, {left})"


class EvaluationStatus(msgspec.Struct, frozen=True):
    """The newest evaluation, of the weights before round `round`, by a member. The loss (None:
    it was not finite) and its standard error are in nats a token, `tokens` the run's by then;
    `own` is true among pairs, where each member has weights, and values, of its own. `sample` is a
    text that evaluated weights wrote, and `difference` says which two members' values differ."""

    round: int
    by: str
    loss: float | None
    standard_error: float
    bits_per_byte: float | None
    tokens: int
    own: bool = False
    sample: str = ""
    difference: str = ""

    def said(self) -> str:
        """Return the value, its round and its member, as a phrase."""
        if self.loss is None:
            value = "not finite"
        else:
            value = f"{self.loss:.3f} ± {self.standard_error:.3f} nats a token"
        if self.bits_per_byte is not None:
            value += f", {self.bits_per_byte:.3f} bits a byte"
        who = self.by[-8:]
        whose = f"of the weights that {who} alone has" if self.own else f"by {who}"
        return f"{value} (before round {self.round}, {whose})"

    def remarks(self) -> list[str]:
        """Return what else there is to say, line by line."""
        sample = f"the weights write: {self.sample}" if self.sample else ""
        return [line for line in (self.difference, sample) if line]

    def lines(self) -> list[str]:
        """Return all of it, line by line."""
        return [f"held-out loss: {self.said()}", *self.remarks()]


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
    held_out_missing: int = 0
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
    busy_share: float | None = None
    evaluation: EvaluationStatus | None = None
    data: DataStatus | None = None


def measures_of(status: Status, time_s: float) -> Measures:
    """Return what a node's status measured at this time."""
    rounds = {f"rounds_{how}": status.rounds.get(how, 0) for how in OUTCOMES}
    evaluated = status.evaluation
    return Measures(
        time_s=time_s,
        step=status.step,
        loss=status.loss,
        tokens=status.tokens,
        tokens_per_s=status.tokens_per_s,
        sent_bytes=status.sent_bytes,
        received_bytes=status.received_bytes,
        busy_share=status.busy_share,
        peers=len(status.members),
        **rounds,
        evaluation_round=None if evaluated is None else evaluated.round,
        evaluation_loss=None if evaluated is None else evaluated.loss,
        evaluation_error=None if evaluated is None else evaluated.standard_error,
        evaluation_bits=None if evaluated is None else evaluated.bits_per_byte,
    )


def awaited_state(coming: StateProgress | None) -> tuple[Waiting, ...]:
    """Return the wait for a state that is downloaded, if there is one."""
    if coming is None:
        return ()
    left_s = None if coming.left_s is None else round(coming.left_s, 1)
    here, rate = coming.here_bytes, round(coming.bytes_per_s)
    share = round(coming.rounds_share, 4)
    download = DownloadStatus(here, coming.total_bytes, rate, left_s, share)
    return (Waiting("state", -1, (), left_s or 0.0, download),)


def watched(watch: EvaluationWatch | None) -> EvaluationStatus | None:
    """Return what a node knows of the newest evaluation; None if it knows of none."""
    newest = None if watch is None else watch.newest
    if watch is None or newest is None:
        return None
    member, value = newest
    return EvaluationStatus(
        **msgspec.structs.asdict(value),
        by=member,
        own=watch.alone,
        sample=watch.evaluations.sample,
        difference=watch.difference,
    )


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
