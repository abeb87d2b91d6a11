"""The guard of pure tests: what they may not touch fails at once, and says so.

A pure test is a function of the tree: it sees no real clock, socket or process, draws nothing and
leaves no thread, so it ends the same way on any machine. docs/testing.md says which tests are pure.
The guard also sees helpers and the product's own code.
"""

import asyncio
import functools
import gc
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy.random  # noqa: F401 - it takes what it draws with before that is guarded
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.sim.virtual_time import VirtualLoop

REMEDY = (
    "mark the test `net` if it needs this, otherwise use virtual time and seeds (docs/testing.md)"
)
THREAD_ENDS_S = 60.0  # for one that is on its way out
SHARED_THREADS = {"tqdm_monitor"}  # a library's, which it starts once


def always(*args, **options):
    return True


def does_more_than_list_fonts(_, args, *rest, **options):
    """Where no list of the machine's fonts is kept, matplotlib makes one as it is imported."""
    return not isinstance(args, list) or args[:1] != ["fc-list"]


def is_real(loop):
    return not isinstance(loop, VirtualLoop)


class Forbidden(NamedTuple):
    """A name that pure tests may not call: its owner, what it is, and the calls that are meant."""

    owner: Any
    name: str
    what: str
    when: Callable[..., bool] = always


FORBIDDEN = (
    Forbidden(time, "sleep", "time.sleep"),
    Forbidden(socket.socket, "bind", "socket.bind"),
    Forbidden(subprocess.Popen, "__init__", "subprocess.Popen", does_more_than_list_fonts),
    Forbidden(os, "fork", "os.fork"),
    Forbidden(os, "forkpty", "os.forkpty"),
    Forbidden(os, "posix_spawn", "os.posix_spawn"),
    Forbidden(os, "posix_spawnp", "os.posix_spawnp"),
    Forbidden(asyncio.SelectorEventLoop, "run_forever", "an event loop in real time", is_real),
    # Not os.urandom: libraries draw what they do not use, as numpy does for a generator with a key.
    *(Forbidden(secrets, name, f"secrets.{name}") for name in ("randbits", "token_bytes")),
    Forbidden(Ed25519PrivateKey, "generate", "a drawn key"),
    Forbidden(X25519PrivateKey, "generate", "a drawn key"),
)


class Guard:
    """Watches one test at a time, in every thread of the process."""

    def __init__(self):
        self.touched, self._unwatched, self._threads = [], threading.Event(), set()
        self._unwatched.set()
        for each in FORBIDDEN:
            setattr(each.owner, each.name, self._guarded(each))
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

    def begin(self):
        """Note which threads there are before a test."""
        self._threads = set(threading.enumerate())

    def end(self):
        """Fail if a thread that began since outlives the test."""
        if set(threading.enumerate()) <= self._threads:
            return
        gc.collect()  # the threads of an executor end with it
        ends_s = time.monotonic() + THREAD_ENDS_S
        left = set(threading.enumerate()) - self._threads
        left = {thread for thread in left if thread.name not in SHARED_THREADS}
        for thread in left:
            thread.join(max(0.0, ends_s - time.monotonic()))
        if names := sorted(thread.name for thread in left if thread.is_alive()):
            pytest.fail(
                f"a pure test left threads behind: {', '.join(names)}; end them, or {REMEDY}"
            )

    def _guarded(self, forbidden):
        original = getattr(forbidden.owner, forbidden.name)

        @functools.wraps(original)
        def guarded(*args, **options):
            if self._unwatched.is_set() or not forbidden.when(*args, **options):
                return original(*args, **options)
            self.touched.append(forbidden.what)
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
