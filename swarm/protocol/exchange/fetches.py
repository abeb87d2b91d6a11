"""The chunks that one exchange fetches, and the members that can be asked for each."""

import functools
from collections.abc import Callable, Iterable

from farflock.swarm.protocol.exchange.actions import Actions, Fetch
from farflock.swarm.protocol.exchange.availability import Availability, RoundItem
from farflock.swarm.protocol.exchange.roster import Roster

Holders = Callable[[], tuple[int, ...]]  # the members to ask now


class Fetches:
    """Asks for each digest once at a time.

    Items are numbered so that `index % shards` is their shard. `holding` says whether the chunk store
    has a digest already; `makers` are the members that ought to have an item whether or not they said
    so.
    """

    def __init__(
        self,
        roster: Roster,
        availability: Availability,
        actions: Actions,
        shards: int,
        holding: Callable[[bytes], bool],
        makers: Callable[[RoundItem], tuple[int, ...]] = lambda item: (),
    ) -> None:
        self._roster, self._holdings, self._actions = roster, availability, actions
        self._shards = shards
        self._holding, self._makers = holding, makers
        self._running: set[bytes] = set()
        # By item, the members that announced it: what a member announces it holds.
        self._announcers: dict[bytes, set[int]] = {}

    def announced(self, member: int, item: RoundItem) -> None:
        """Note an item that a member announces, and fetch it if it is new here."""
        if self._holdings.add(item):
            self._announcers.setdefault(item.digest, set()).add(member)
            self.collect([item])
        elif item.digest in self._announcers:
            self._announcers[item.digest].add(member)

    def collect(self, items: Iterable[RoundItem]) -> None:
        """Fetch those of these items that are not here yet."""
        for item in items:
            holders = functools.partial(self._holders, item)
            self.fetch(item.index % self._shards, item.digest, item.size, holders)

    def fetch(self, shard: int, digest: bytes, size: int, holders: Holders) -> None:
        """Fetch a chunk that is neither here, nor corrupt, nor on its way."""
        held, corrupt = self._holdings.held, self._holdings.corrupt
        if digest in self._running or digest in held or digest in corrupt:
            return
        if self._holding(digest):
            self._holdings.hold(digest)
        else:
            self._running.add(digest)
            self._actions.add(Fetch(shard, digest, size, holders))

    def ended(self, digest: bytes, *, intact: bool, corrupt: bool) -> None:
        """A fetch is over; what could not be had now may be asked for again."""
        self._running.discard(digest)
        if corrupt:
            self._holdings.spoil(digest)
        elif intact:
            self._holdings.hold(digest)

    def _holders(self, item: RoundItem) -> tuple[int, ...]:
        """The members that announced an item or hold it; while none of them lives, its makers too.

        The chunk store asks the least busy of these, so no member that cannot have the item yet may
        be among them: it would only answer, a round trip later, that it does not.
        """
        me = self._roster.me
        known = {*self._announcers.get(item.digest, ()), *self._holdings.said(item)} - {me}
        if known - self._roster.suspects:
            return tuple(sorted(known))
        makers = (member for member in self._makers(item) if member != me)
        return tuple(dict.fromkeys((*sorted(known), *makers)))
