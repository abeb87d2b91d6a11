"""Virtual time: an asyncio loop whose clock jumps to the next timer instead of sleeping.

The product's own coroutines run on it unchanged; hours of a swarm pass reproducibly in seconds.
"""

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")

STANDSTILL = 100_000  # turns of the loop without progress of the clock
# Above one step of a double at any time shown here, so that no due timer is missed.
RESOLUTION_S = 1e-6


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: nothing can ever happen again."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that waits for no file, but moves the clock by the time the loop would sleep."""

    def __init__(self, start_s: float) -> None:
        super().__init__()
        self.now_s = start_s
        self._standing = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set; give the wait a deadline")
        before_s = self.now_s
        self.now_s += max(timeout, 0.0)
        self._standing = self._standing + 1 if self.now_s == before_s else 0
        if self._standing > STANDSTILL:
            raise Deadlock(
                f"the clock shows {self.now_s} s after {STANDSTILL} turns of the loop; "
                "find the task that spins, and let it sleep"
            )
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps, and that ends if it is interrupted: see `run_virtual`."""

    def __init__(self, start_s: float) -> None:
        self._jumping = _JumpingSelector(start_s)
        super().__init__(self._jumping)
        self._clock_resolution = RESOLUTION_S
        self._begun = self._interrupted = False

    def time(self) -> float:
        return self._jumping.now_s

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:  # noqa: ANN401
        task = super().create_task(coro, **options)
        if self._begun:  # the first task is main, whose error comes out anyway
            task.add_done_callback(_pass_on_interruption)
        self._begun = True
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Let what interrupted a callback end the run; once, as tasks have yet to be cancelled."""
        error = context.get("exception")
        if _interrupts(error) and not self._interrupted:
            self._interrupted = True
            raise error
        super().call_exception_handler(context)


def _pass_on_interruption(task: asyncio.Task[Any]) -> None:
    # Not `exception()`, or asyncio would not tell of an error that nobody has looked at.
    if _interrupts(error := task._exception):
        raise error


def _interrupts(error: BaseException | None) -> TypeGuard[BaseException]:
    """True if what ended a task or a callback is neither its error nor its cancellation.

    asyncio itself ends a run for Ctrl-C and for `SystemExit`."""
    usual = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
    return error is not None and not isinstance(error, usual)


def run_virtual(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """Run a coroutine in virtual time; raise `Deadlock` where a real loop would hang.

    What interrupts it from outside, such as a test's time limit, can strike in any task. It ends
    the run with that very exception: a task that died of it would look like one that failed."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_s)) as runner:
        try:
            return runner.run(main)
        except BaseException:
            # It may have struck inside asyncio, so that a task never hears of its cancellation.
            with contextlib.suppress(Deadlock):
                runner.close()
            raise
