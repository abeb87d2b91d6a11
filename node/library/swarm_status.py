"""The state of a swarm as a program can show it, in numbers and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from farflock.node.library.loop_measures import RoundReport
from farflock.swarm.peer.peer import OpenWait, Peer

_SHOWN = 8  # characters at the end of a peer's id, enough to tell members apart
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The swarm as this peer sees it now; `str` of it says so in one sentence.

    `members` includes this peer; `sent_bytes` and `received_bytes` are all its traffic so far;
    `waits_for` are the members from which it waits for its part of an exchange, and `unheard` those
    that have been silent: they stay members until the others agree on a change."""

    peer: str = ""
    members: tuple[str, ...] = ()
    last_round: RoundReport | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    waits_for: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the status in words."""
        others = _named([member for member in self.members if member != self.peer])
        silent = f"; nothing is heard of {_named(self.unheard)}" if self.unheard else ""
        return (
            f"{_counted(len(self.members), 'member')} (this peer{others and ', ' + others}); "
            f"{_round_words(self.last_round)}; {_size(self.sent_bytes)} sent, "
            f"{_size(self.received_bytes)} received; waits for {_named(self.waits_for) or 'nobody'}"
            f"{silent}"
        )


def status_of(
    peer: Peer,
    members: tuple[str, ...],
    last_round: RoundReport | None,
    waits: Sequence[OpenWait] | None,
) -> SwarmStatus:
    """Return the status of a peer that has these open waits, on its event loop; None of a peer that
    has left, which hears nobody and waits for nobody."""
    sent, received = peer.context.links.total_bytes()
    status = SwarmStatus(peer.me, members, last_round, sent, received)
    if waits is None:
        return status
    whom = {member for wait in waits for member in wait.whom}
    others = (member for member in members if member != peer.me)
    silent = [each for each in others if peer.context.life(each) in ("suspect", "dead")]
    return replace(status, waits_for=tuple(sorted(whom)), unheard=tuple(silent))


def _round_words(last: RoundReport | None) -> str:
    if last is None:
        return "no round yet"
    peers = _counted(last.peers, "peer")
    return f"last round: {last.stream} {last.number}, {last.status}, {peers}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _named(members: Sequence[str]) -> str:
    return ", ".join(f"…{member[-_SHOWN:]}" for member in members)


def _size(count: float) -> str:
    """Return a number of bytes in the largest fitting unit, with three digits."""
    unit = 0
    while count >= 999.5 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"
