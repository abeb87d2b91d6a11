"""Guests: peers that are no members yet, and are served and relayed for because they may come in.

Identities are free, and serving costs a line. So a stranger gets nothing until it shows a
capability, in a request that nobody else can use, and then a place for a while. The holders of one
capability share a few places: a word that was passed on must not fill them all. So do those of all
capabilities that one member issued: it may issue any number.

Sans I/O: the caller has checked the capability, and brings the time.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS

MAX_UNADMITTED = 8  # guests of one capability at a time, and of all that one member issued
MAX_GUESTS = MAX_MEMBERS  # of all capabilities
PLACE_LASTS_S = 30.0  # after the last request, of which some may be lost
PLACE_HELD_S = 600.0  # for which nobody takes a place that is renewed


@dataclass(frozen=True, slots=True)
class _Place:
    capability: bytes  # its id
    inviter: PeerId | None  # the member that issued it, unless the founder or an authority did
    since_s: float
    until_s: float


class Guests:
    """The places of guests: a peer keeps its own by asking again."""

    def __init__(self) -> None:
        self._places: dict[PeerId, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def has(self, peer: PeerId, now_s: float) -> bool:
        """Return whether a peer has a place."""
        place = self._places.get(peer)
        return place is not None and now_s < place.until_s

    def take(
        self,
        peer: PeerId,
        capability: bytes,
        max_guests: int,
        now_s: float,
        inviter: PeerId | None = None,
    ) -> bool:
        """Give a peer a place, of `max_guests` of its capability and `MAX_UNADMITTED` of the member
        that issued it, or renew it; return False if others have them.

        One that was held for `PLACE_HELD_S` goes to whoever waits, so that keys which never come
        in do not keep others out."""
        self._keep(peer for peer, place in self._places.items() if now_s < place.until_s)
        mine = self._places.get(peer)
        if mine is None or mine.capability != capability:
            self.forget(peer)
            mates = [each for each, at in self._places.items() if at.capability == capability]
            has_room = self._has_room(mates, max_guests, now_s)
            if inviter is not None:
                mates = [each for each, at in self._places.items() if at.inviter == inviter]
                has_room = has_room and self._has_room(mates, MAX_UNADMITTED, now_s)
            if not (has_room and self._has_room(self._places, MAX_GUESTS, now_s)):
                return False
            mine = _Place(capability, inviter, now_s, now_s)
        self._places[peer] = replace(mine, until_s=now_s + PLACE_LASTS_S)
        return True

    def forget(self, peer: PeerId) -> None:
        """Take a peer's place away."""
        self._places.pop(peer, None)

    def forget_all(self, is_admitted: Callable[[PeerId], bool]) -> None:
        """Forget the guests that need no place any more."""
        self._keep(peer for peer in self._places if not is_admitted(peer))

    def _keep(self, peers: Iterable[PeerId]) -> None:
        self._places = {peer: self._places[peer] for peer in list(peers)}

    def _has_room(self, among: Collection[PeerId], max_guests: int, now_s: float) -> bool:
        """Return whether these are fewer than `max_guests`, if need be without the one that has had
        its place for longest."""
        if len(among) < max_guests:
            return True
        oldest = min(among, key=lambda peer: self._places[peer].since_s, default=None)
        if oldest is None or now_s - self._places[oldest].since_s < PLACE_HELD_S:
            return False
        self.forget(oldest)
        return True
