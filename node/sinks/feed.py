"""The way of a node's measures to the places that show them, which can never stop training.

Each sink has a thread and a bounded queue. Handing measures over never waits: those that find the
queue full are left out. A sink that fails is closed, and opened again with later measures.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from farflock.node.errors import explained
from farflock.node.sinks.measures import Measures

MAX_WAITING = 64  # measures that a sink has not taken yet
MAX_LEFT_OUT = 1024  # measures between two attempts to open a sink that fails
CLOSE_TIMEOUT_S = 10.0  # for all sinks together

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place where measures go. One thread alone calls it; both methods may block or raise."""

    def write(self, measures: Measures) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose measures they are: the node's folder, the ids of its run and of itself."""

    folder: Path
    run: str
    peer: str


OpenSink = Callable[[Origin], Sink]


class Feed:
    """One sink, in a thread of its own that does not keep the process alive. The first time that it
    fails or is too slow is said; nothing is said twice."""

    def __init__(self, name: str, opened: Callable[[], Sink]) -> None:
        self._name, self._opened = name, opened
        self._waiting: queue.SimpleQueue[Measures | None] = queue.SimpleQueue()
        self._unsaid = threading.Lock()  # taken for good by the first who says something
        self._thread = threading.Thread(target=self._serve, name=f"log {name}", daemon=True)
        self._thread.start()

    def write(self, measures: Measures) -> None:
        """Hand measures over, without a wait."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(measures)
        else:
            self._say("it is too slow, and some are left out")

    def end(self) -> None:
        """Let the sink take what waits and close, without a wait; nothing may be written after."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the sink has closed, or until time is up."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say("it has not taken the last ones in time")

    def _serve(self) -> None:
        sink: Sink | None = None
        failures = left_out = 0
        while (measures := self._waiting.get()) is not None:
            if left_out:
                left_out -= 1
                continue
            try:
                sink = sink or self._opened()
                sink.write(measures)
                failures = 0
            except Exception as error:  # a border: a sink is other people's code
                self._failed(error)
                self._close(sink)
                sink, failures = None, failures + 1
                left_out = min(2**failures, MAX_LEFT_OUT)
        self._close(sink)

    def _close(self, sink: Sink | None) -> None:
        try:
            if sink is not None:
                sink.close()
        except Exception as error:  # as above
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        known = explained(error)
        self._say(f"{type(error).__name__}: {error}" if known is None else str(known))

    def _say(self, why: str) -> None:
        if self._unsaid.acquire(blocking=False):
            log.warning("%s does not get all measures, training goes on: %s", self._name, why)


class Feeds:
    """All sinks of a node, which get its measures every `every_s` seconds, and the last ones."""

    def __init__(
        self,
        sinks: Mapping[str, OpenSink],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sinks, self._every_s, self._clock = sinks, every_s, clock
        self._feeds: list[Feed] = []
        self._next_s = 0.0
        self._newest: Measures | None = None  # unless it was handed over

    def write(self, origin: Origin, measures: Measures) -> None:
        """Take measures, and hand them over if it is time. The first ones open the sinks."""
        if not self._feeds:
            self._next_s = self._clock()
            self._feeds = [
                Feed(name, partial(opened, origin)) for name, opened in self._sinks.items()
            ]
        self._newest = measures
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._flush()

    def close(self) -> None:
        """Hand over the newest measures, and wait a moment for the sinks to close."""
        self._flush()
        ends_s = self._clock() + CLOSE_TIMEOUT_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(ends_s - self._clock(), 0.0))
        self._feeds = []

    def _flush(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            for feed in self._feeds:
                feed.write(newest)
