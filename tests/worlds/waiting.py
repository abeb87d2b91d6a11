"""Waiting for conditions, in virtual time and in real time.

A test of real processes waits for what must come at any speed, and never for longer than `LIMIT_S`:
it is a limit against tests that hang, which a slow machine must not reach.
"""

import asyncio
import math
import subprocess
import time

LIMIT_S = 240.0
LAST_LINES = 30


def now():
    return asyncio.get_running_loop().time()


async def until(condition, within_s=math.inf, what="the condition", every_s=0.05):
    """Poll until a condition holds; return the seconds that it took."""
    start_s = now()
    while not condition():
        assert now() - start_s < within_s, f"{what} did not hold within {within_s} s"
        await asyncio.sleep(every_s)
    return now() - start_s


def until_real(condition, what, tell=lambda: "", every_s=0.05):
    """Poll in real time until a condition returns something true, and return that.

    A failure says `what` was waited for, and what `tell` says of the processes behind it. A
    condition ends the wait early by an assertion of its own, such as that a process still runs.
    """
    ends_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"{what} did not come within {LIMIT_S:.0f} s\n{tell()}")
        time.sleep(every_s)
    return found


def told(name, process, log):
    """Return a process's state and the last lines of its log, for a failure's message."""
    code = process.poll()
    state = "runs" if code is None else f"has ended with {code}"
    try:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        lines = [f"no log: {error}"]
    return "\n".join([f"{name} (process {process.pid}) {state}; its log ends:", *lines])


def ended(process, what, tell=lambda: ""):
    """Wait for a process to end; return its exit code."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{what} did not end within {LIMIT_S:.0f} s\n{tell()}") from None
