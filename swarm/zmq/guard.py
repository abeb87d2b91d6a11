"""A thread that bounds the bytes that libzmq holds unread while the event loop is blocked.

libzmq reads whatever its partners send (decision 024). The loop's tick cuts off a sender that is
too far ahead; while no tick comes, this thread does. While a loop with nothing to do ticks rarely,
the thread looks out for it, and wakes it once bytes arrive.
"""

import threading
import time
from collections.abc import Callable

from farflock.swarm.zmq.arrivals import Arrivals
from farflock.swarm.zmq.connection import Connection

MAX_UNREAD_BYTES = 192 * 1024 * 1024  # of all connections together; above it, of an equal share
WATCH_S = 0.05
BLOCKED_S = 0.1  # the loop counts as blocked once a tick is this late
QUIET_BYTES = 256 * 1024  # received by the whole machine since the last look: next to nothing


class Guard:
    """Watches connections of one peer's links until closed; `tick` shows that the loop runs."""

    def __init__(self) -> None:
        self.watched: dict[Connection, None] = {}  # the open connections
        self.alarm: Callable[[], None] = lambda: None  # called in the thread: tick at once
        self._arrivals = Arrivals()
        self._lock = threading.Lock()  # a descriptor that is looked at must not be closed
        self._tick_s = time.monotonic()  # when the loop ticked, or will
        self._ended = threading.Event()
        self._occupied = threading.Event()  # set while a connection is watched, and at the end
        self._thread = threading.Thread(target=self._run, name="links guard", daemon=True)
        self._thread.start()

    def watch(self, connection: Connection) -> None:
        """Bound this connection's unread bytes."""
        with self._lock:
            self.watched[connection] = None
            self._occupied.set()

    def forget(self, connection: Connection) -> None:
        """Close a connection, which has ended."""
        with self._lock:
            self.watched.pop(connection, None)
            connection.close()
            if not self.watched and not self._ended.is_set():
                self._occupied.clear()

    def tick(self, rest_s: float = 0.0) -> None:
        """Note that the loop runs, and will rest for so long unless much arrives.

        Each connection's backlog is up to date."""
        self._tick_s = time.monotonic() + rest_s
        if sum(connection.backlog_bytes for connection in self.watched) > MAX_UNREAD_BYTES:
            self.enforce()

    def is_quiet(self) -> bool:
        """Return whether no connection can have taken in much since the last `begin`."""
        arrived = self._arrivals.since()
        return arrived is not None and arrived < QUIET_BYTES

    def begin(self) -> None:
        """Count arriving bytes from here: each connection's limit is about to be checked."""
        self._arrivals.begin()

    def _run(self) -> None:
        while self._occupied.wait() and not self._ended.is_set():
            since_s = time.monotonic() - self._tick_s
            if since_s > BLOCKED_S:
                self.enforce()
            elif since_s < 0 and not self.is_quiet():
                self._tick_s = time.monotonic()
                self.alarm()
            # There is nothing to see before the next tick is overdue or bytes arrive.
            self._ended.wait(max(WATCH_S, min(BLOCKED_S, BLOCKED_S - since_s)))

    def enforce(self) -> None:
        """Cut off each connection that is too far ahead of us, by the sum over all if need be.

        What a connection that was cut off has sent stays until the loop reads it, and counts."""
        with self._lock:
            unread = {connection: connection.unread() for connection in self.watched}
            is_full = sum(unread.values()) > MAX_UNREAD_BYTES
            share_bytes = MAX_UNREAD_BYTES // max(1, len(unread))
            for connection, ahead_bytes in unread.items():
                limit_bytes = share_bytes if is_full else connection.limit_bytes
                if ahead_bytes > limit_bytes and not connection.kicked:
                    connection.guarded = True
                    connection.kick()

    def close(self) -> None:
        """End the thread; no connection may be left."""
        self._ended.set()
        self._occupied.set()
        self._thread.join()
        self._arrivals.close()
