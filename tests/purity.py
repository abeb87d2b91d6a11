"""The guard of pure tests: what they may not touch fails at once, and says so.

A pure test is a function of the tree: it sees no real clock, socket or process, so it ends the same
way on any machine. docs/testing.md says which tests are pure. The guard also sees helpers and the
product's own code.
"""

import asyncio
import functools
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest

from farflock.swarm.sim.virtual_time import VirtualLoop

REMEDY = "mark the test `net` if it needs this, otherwise use virtual time (docs/testing.md)"


FORBIDDEN = (
    (time, "sleep", "time.sleep"),
    (socket.socket, "bind", "socket.bind"),
    (subprocess.Popen, "__init__", "subprocess.Popen"),
    (os, "fork", "os.fork"),
    (os, "forkpty", "os.forkpty"),
    (os, "posix_spawn", "os.posix_spawn"),
    (os, "posix_spawnp", "os.posix_spawnp"),
    (asyncio.SelectorEventLoop, "run_forever", "an event loop in real time"),
)


class Guard:
    """Watches one test at a time, in every thread of the process."""

    def __init__(self):
        self.touched, self._unwatched = [], threading.Event()
        self._unwatched.set()
        for owner, name, what in FORBIDDEN:
            setattr(owner, name, self._guarded(getattr(owner, name), what))
        signal.signal(signal.SIGUSR2, lambda *_: self.check())

    @contextmanager
    def watching(self):
        """Fail at the first touch in the block, or at its end if that failure was swallowed."""
        self.touched = []
        self._unwatched.clear()
        try:
            yield
        finally:
            self._unwatched.set()
        self.check()

    def check(self):
        """Fail if something was touched."""
        if self.touched:
            pytest.fail(f"a pure test touched {', '.join(sorted(set(self.touched)))}; {REMEDY}")

    def _guarded(self, original, what):
        @functools.wraps(original)
        def guarded(*args, **options):
            is_virtual = bool(args) and isinstance(args[0], VirtualLoop)
            if self._unwatched.is_set() or is_virtual:
                return original(*args, **options)
            self.touched.append(what)
            if threading.current_thread() is not threading.main_thread():
                self._interrupt()
            return self.check()

        return guarded

    def _interrupt(self):
        """End the main thread's wait for this one. What a signal's handler raises may be swallowed,
        as in a finalizer, so there are several."""
        for _ in range(5):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
            if self._unwatched.wait(1.0):
                break


GUARD = Guard()
