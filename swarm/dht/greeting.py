"""The first peers' answers when this one joins: the time, and whether they can dial back.

The majority decides, so that one lying peer in an invite cannot keep anyone out.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SKEW_S = 3.0  # hivemind's own limit, which every peer applies


class DirectoryUnreachable(ConnectionError):
    """No way into the run's table of peers; the message names cause and remedy."""


class ClockSkew(DirectoryUnreachable):
    """This machine's wall clock is too far off; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """One answer: the least lead of our clock over the peer's, and whether it could dial back."""

    ahead_s: float
    dialled_back: bool


def clock_ahead_s(sent_s: float, received_s: float, their_s: float) -> float:
    """Return the least possible lead of our clock over one read between the two times.

    A negative lead is a lag; 0 means that the clocks may agree."""
    if their_s < sent_s:
        return sent_s - their_s
    return min(0.0, received_s - their_s)


def judge(asked: int, greetings: Sequence[Greeting], client_mode: bool) -> None:
    """Raise `ClockSkew` or `DirectoryUnreachable`, with a remedy, if this peer cannot take part."""
    if not greetings:
        raise DirectoryUnreachable(
            f"none of the {asked} addresses answered; "
            "check this machine's network, or ask any member for a fresh invite"
        )
    wrong = [greeting.ahead_s for greeting in greetings if abs(greeting.ahead_s) > MAX_SKEW_S]
    if 2 * len(wrong) > len(greetings):
        ahead_s = statistics.median_low(wrong)
        side = "ahead of" if ahead_s > 0 else "behind"
        raise ClockSkew(
            f"this machine's clock is {abs(ahead_s):.1f} s {side} the swarm's "
            f"(at most {MAX_SKEW_S:.0f} s are allowed); set it by NTP and join again"
        )
    dialled = sum(greeting.dialled_back for greeting in greetings)
    if not client_mode and 2 * dialled < len(greetings):
        raise DirectoryUnreachable(
            f"{len(greetings) - dialled} of {len(greetings)} peers could not dial this machine "
            "back; open its port, or join in client mode, without being dialled"
        )
