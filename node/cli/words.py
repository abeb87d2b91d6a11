"""A node's status in plain words, for tables and for lines."""

from farflock.node.demo.demo import Child
from farflock.node.process.status import DataStatus, PartnerStatus, Status

ADMITTED = ", and waits to be admitted"  # how a status ends before the node is a member
STATES = {
    "trains": "training",
    "is leaving": "leaving",
    "has ended": "ended",
    "waits for members": "waiting for members",
}
LIVES = {
    "alive": "answering",
    "suspect": "not answering",
    "dead": "gone",
    "unknown": "not contacted yet",
}
ROADS = {
    "direct": "direct",
    "forwarded": "relayed",
    "libp2p": "relayed by libp2p",
    "none": "no connection",
}
ROUNDS = {
    "ok": "complete",
    "partial": "without some peers",
    "alone": "without a partner",
    "failed": "failed",
}


def doing(status: Status, view_s: float | None = None, had_partner: bool = True) -> str:
    """Say what a node does. A membership change takes at most `view_s`, if that is known."""
    if ADMITTED in status.doing:
        soon = "" if view_s is None else f", up to {view_s:g} s"
        if status.loss is None:
            return f"waiting to be admitted{soon}"
        act = _act(status.doing.removesuffix(ADMITTED))
        return f"{act}; will be counted from the next membership change{soon}"
    return _act(status.doing) + ("" if had_partner else "; no partner this round")


def _act(said: str) -> str:
    if said.startswith("serves "):
        return f"serving {said.removeprefix('serves ')}"
    what, colon, rest = said.partition(":")
    return STATES.get(what, what) + colon + rest


def life(partner: PartnerStatus) -> str:
    """Say whether another member answers."""
    return LIVES.get(partner.life, partner.life)


def road(partner: PartnerStatus) -> str:
    """Say how messages travel to another member."""
    return ROADS.get(partner.road, partner.road)


def rounds(status: Status) -> str:
    """Say how the rounds that a node has applied went."""
    counts = sorted(status.rounds.items())
    return ", ".join(f"{count:,} {ROUNDS.get(kind, kind)}" for kind, count in counts)


def data(found: DataStatus | None) -> str:
    """Return what a node has of its run's prepared data; nothing for a run on a corpus."""
    if found is None:
        return ""
    clauses = [
        f"{short(found.tokens)} tokens",
        f"{found.seen / max(found.shards, 1):.0%} seen",
        f"{found.here:,} of {several(found.shards, 'shard')} here",
        f"{size(found.fetched_bytes)} fetched",
        f"{size(found.sent_bytes)} given",
    ]
    if found.held_out_missing:
        clauses.append(f"{several(found.held_out_missing, 'held-out shard')} still to come")
    if found.skipped:
        lost = f"{several(found.skipped, 'shard')} ({short(found.skipped_tokens)} tokens)"
        clauses.append(f"{lost} skipped, as nobody has them")
    return ", ".join(clauses)


def copies(found: DataStatus) -> str:
    """Return how many members have the data beside the founder."""
    if found.copies >= found.wanted > 0:
        holders = several(found.wanted, "holder")
        return f"every shard has {holders} beside the founder: it may go"
    return f"some shards have {several(found.copies, 'holder')} beside the founder"


def peer_state(child: Child, status: Status | None) -> str:
    """Say in a few words what a demo's peer is doing."""
    if child.killed:
        return "killed"
    if child.stopped:
        return "frozen"
    if not child.running:
        return "finished"
    if status is None:
        return "starting"
    return "waiting to be admitted" if ADMITTED in status.doing else _act(status.doing)


def size(count: int) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def short(count: int) -> str:
    """Return a large number as text of three or four characters."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def several(count: int, one: str) -> str:
    """Return a number and a noun that agrees with it."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
