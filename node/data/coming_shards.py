"""A source whose shards are fetched while it is read: the seam between the thread that trains and
the task that fetches (node/process/data_supply.py).

The thread says what it reads next, and waits until some of it is here. What is late is read after
what is here; what nobody has is given up, said and counted.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farflock.node.data.local_shards import LocalShards
from farflock.node.tokens.tokenizer import TokenIds

LOOK_S = 0.2  # between two looks of a waiting thread

log = logging.getLogger(__name__)


class ReadingStopped(Exception):
    """The node stops, and what its thread waits for need not come."""


@dataclass(slots=True)
class ShardCounts:
    """Counts of shards that were to be read."""

    read: int = 0
    late: int = 0  # of them, those that were read after others of their group
    skipped: int = 0  # nobody had them
    skipped_tokens: int = 0


class FetchedShards:
    """The shards of one root that are trained on, as far as they have come.

    `stops` tells whether the node stops. Any thread may call any method."""

    def __init__(self, local: LocalShards, stops: Callable[[], bool] = lambda: False) -> None:
        self.local, self.stops = local, stops
        self.now: tuple[int, ...] = ()
        self.then: tuple[int, ...] = ()
        self.wake: Callable[[], object] = lambda: None  # told when something else is wanted
        self.failure: BaseException | None = None  # of what fetches, raised where it is waited for
        self.counts = ShardCounts()
        self.waits_for = ""  # in words; nothing while nothing is waited for
        self.seen: set[int] = set()  # shards that were read
        self._gone: set[int] = set()
        self._came = threading.Condition()

    # as a source of shards

    @property
    def name(self) -> str:
        """The root of the data."""
        return self.local.table.root

    @property
    def end_of_text(self) -> int:
        """The token that ends documents."""
        return self.local.table.index.end_of_text

    @property
    def sizes(self) -> Sequence[int]:
        """The tokens of each shard."""
        return self.local.table.train_sizes()

    def read(self, number: int) -> TokenIds:
        """Return the tokens of a shard, and wait for it if it is not here any more."""
        while True:
            tokens = self.local.tokens(number)
            if tokens is not None:
                self.seen.add(number)
                self.counts.read += 1
                return tokens
            self.wake()
            self._wait([number])

    def expect(self, now: Sequence[int], then: Sequence[int]) -> None:
        """Note which shards are read next, and which after them. What was given up before, and is
        read again, may be back."""
        if (self.now, self.then) != (tuple(now), tuple(then)):
            self._gone &= set(now)
            self.now, self.then = tuple(now), tuple(then)
            self.wake()

    def here(self, wanted: Sequence[int], *, all_of: bool) -> tuple[list[int], list[int]]:
        """Wait until one of these shards is here, or all of them; return those that are, and those
        that are given up. Raise `ReadingStopped` if the node stops, or what the fetching ends
        with."""
        while True:
            here = [number for number in wanted if self.local.has(number)]
            gone = [number for number in wanted if number in self._gone and number not in here]
            missing = [number for number in wanted if number not in {*here, *gone}]
            if not missing or (here and not all_of):
                self.waits_for = ""
                self._count(missing, gone)
                return here, gone
            self._wait(missing)

    # as what is fetched

    @property
    def wanted(self) -> tuple[int, ...]:
        """The shards that are read next, and those after them."""
        return (*self.now, *self.then)

    @property
    def missing(self) -> list[int]:
        """The wanted shards that are not here, in the order of need, but for those given up."""
        return [n for n in self.wanted if not self.local.has(n) and n not in self._gone]

    def came(self) -> None:
        """Let a waiting thread look again."""
        with self._came:
            self._came.notify_all()

    def give_up(self, number: int) -> None:
        """Note that nobody has a shard."""
        if number in self._gone:
            return
        log.warning(
            "nobody has the shard %s… of the run's data any more: its %s tokens are skipped",
            self.local.table.digest(number).hex()[:16],
            f"{self.local.table.tokens(number):,}",
        )
        self._gone.add(number)
        self.came()

    def _wait(self, missing: Sequence[int]) -> None:
        if self.failure is not None:
            raise self.failure
        if self.stops():
            raise ReadingStopped
        digest = self.local.table.digest(missing[0]).hex()
        self.waits_for = f"the shard {digest[:16]}… of the run's data"
        with self._came:
            self._came.wait(LOOK_S)

    def _count(self, late: Sequence[int], gone: Sequence[int]) -> None:
        if late and not self.counts.late:
            log.warning(
                "data come late: this node trains on the shards that are here, and reads %d others"
                " after them",
                len(late),
            )
        self.counts.late += len(late)
        self.counts.skipped += len(gone)
        self.counts.skipped_tokens += sum(map(self.local.table.tokens, gone))
