"""A bridge between threads and asyncio: it runs a swarm in its own thread, next to a user's
program.

A user's training loop is synchronous and owns the main thread; links and agreement need an event
loop that runs even during a long step. The thread is a daemon thread that its creator must close
(`SwarmOptimizer` does at the end of its block, when garbage-collected, and at exit).
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from itertools import takewhile
from typing import Any, Generic, TypeVar

from farflock.node.errors import Failure, FarflockError, explained
from farflock.swarm.tasks import cancel

T = TypeVar("T")
R = TypeVar("R")

Enter = Callable[[], AbstractAsyncContextManager[T]]

POLL_S = 0.1
END_TIMEOUT_S = 30.0  # for leaving a context; then it is cancelled


class Background:
    """One thread that runs one event loop until `close`."""

    def __init__(self, name: str) -> None:
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = (
            concurrent.futures.Future()
        )
        self._stop = asyncio.Event()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()
        self._loop = self._started.result()

    def enter(self, context: Enter[T]) -> "BackgroundContext[T]":
        """Enter a context on the loop; return once it is entered, or raise what entering raises."""
        life = BackgroundContext[T](self._loop)
        life.begin(context)
        return life

    def run(self, work: Callable[[], R]) -> R:
        """Call a plain function on the loop's thread and return its result."""

        async def called() -> R:
            return work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(END_TIMEOUT_S)

    def close(self) -> None:
        """End everything that runs on the loop, and the thread. It is safe to call this twice."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop may already be closed
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self.thread:
            self.thread.join(END_TIMEOUT_S)

    def _serve(self) -> None:
        async def turn() -> None:
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        asyncio.run(turn())


class BackgroundContext(Generic[T]):
    """A context entered in the background: its value, calls into its loop, and its exit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._entered: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._leave = asyncio.Event()
        self._calls: dict[asyncio.Task[Any], None] = {}
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._leaving = False
        self._unfinished: list[asyncio.Task[Any]] = []  # went through a Ctrl-C, oldest first

    @property
    def value(self) -> T:
        """The value that the context yielded."""
        return self._entered.result()

    @property
    def ended(self) -> bool:
        """True once the context is left."""
        return self._over.done()

    def begin(self, context: Enter[T]) -> None:
        """Enter the context; an interrupted wait also ends it."""
        self._over = asyncio.run_coroutine_threadsafe(self._live(context), self._loop)
        try:
            _first_of(self._entered, self._over)
        except BaseException:
            self._over.cancel()
            concurrent.futures.wait((self._over,), END_TIMEOUT_S)
            raise
        if not self._entered.done():
            if self._over.cancelled():
                raise stopped(None)
            self._over.result()

    def call(self, work: Callable[[], Coroutine[Any, Any, R]], *, through: bool = False) -> R:
        """Run a coroutine on the loop and return its result. If the context ends first, raise the
        error that ended it.

        Ctrl-C cancels the coroutine, unless `through` is set; in that case the next call waits for
        it.
        """
        self._raise_if_over()
        called = self._called(work)
        try:
            return self._wait_for(asyncio.run_coroutine_threadsafe(called, self._loop))
        except BaseException:
            # Ctrl-C may come when the loop has the coroutine and this thread no future yet, so the
            # loop looks for it.
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._abandon, called, through)
            raise

    def _wait_for(self, future: "concurrent.futures.Future[R]") -> R:
        _first_of(future, self._over)
        if not future.done():
            concurrent.futures.wait((future,), POLL_S)  # the end cancels it too, if it began
        if not future.done() or future.cancelled():
            concurrent.futures.wait((self._over,), END_TIMEOUT_S)
            self._raise_if_over()
        return future.result()

    def end(self) -> None:
        """Leave the context and wait until it is left; errors on the way out are not raised
        here."""
        if self._over.done():
            return
        self._loop.call_soon_threadsafe(self._leave.set)
        if self._in_its_thread():
            return
        concurrent.futures.wait((self._over,), END_TIMEOUT_S)
        if not self._over.done():
            self._over.cancel()

    async def _live(self, context: Enter[T]) -> None:
        async with context() as value:
            self._entered.set_result(value)
            try:
                await self._leave.wait()
            finally:
                self._leaving = True
                await cancel(*self._calls)

    async def _called(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        task = asyncio.current_task()
        assert task is not None
        if self._leaving:
            raise asyncio.CancelledError
        self._calls[task] = None
        try:
            # a Ctrl-C may have come before this call began, too
            for earlier in list(takewhile(lambda other: other is not task, self._unfinished)):
                await asyncio.wait([earlier])
                if earlier in self._unfinished:
                    self._unfinished.remove(earlier)
                    earlier.result()  # raises its error, of which nobody has heard
            return await work()
        finally:
            del self._calls[task]

    def _abandon(self, called: Coroutine[Any, Any, Any], through: bool) -> None:
        for task in asyncio.all_tasks():
            if task.get_coro() is called:
                if through:
                    self._unfinished.append(task)
                else:
                    task.cancel()

    def _raise_if_over(self) -> None:
        if self._over.done():
            error = None if self._over.cancelled() else self._over.exception()
            raise stopped(error) from error

    def _in_its_thread(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False


def stopped(error: BaseException | None) -> FarflockError:
    """Return the error that says why the background thread can run nothing more."""
    if error is None:
        return Failure(
            "the optimizer is closed", "it has left its run", "make a new one to continue"
        )
    known = explained(error)
    why = str(known) if known is not None else f"{type(error).__name__}: {error}"
    return Failure(
        "the swarm's background thread has failed",
        why,
        "make a new optimizer to continue",
    )


def _first_of(*futures: "concurrent.futures.Future[Any]") -> None:
    concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)


def in_threads(count: int, work: Callable[[int], R], give_up: Callable[[], None]) -> list[R]:
    """Return the results of `work(0)` to `work(count - 1)`, each run in a thread of its own.

    The first error, or Ctrl-C, ends the other threads through `give_up` and is then raised."""
    with concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="peer") as pool:
        futures = [pool.submit(work, number) for number in range(count)]
        try:
            done, _ = concurrent.futures.wait(
                futures, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            failed = [
                future for future in futures if future in done and future.exception() is not None
            ]
            if failed:
                failed[0].result()
        except BaseException:
            give_up()
            raise
        return [future.result() for future in futures]
