"""Waiting for conditions, in virtual time and in real time.

A test of real processes waits for what must come at any speed, and never for longer than `LIMIT_S`:
it is a limit against tests that hang, which a slow machine must not reach.
"""

import asyncio
import contextlib
import inspect
import math
import select
import subprocess
import time

import psutil

from farflock.swarm.sim.virtual_time import VirtualLoop

LIMIT_S = 240.0
LAST_LINES = 30


def now():
    return asyncio.get_running_loop().time()


async def until(condition, within_s=None, what=None, every_s=0.05):
    """Poll until a condition holds; return the seconds that it took.

    Without `within_s` it may take `LIMIT_S`, and in virtual time for ever.
    """
    start_s = now()
    if within_s is None:
        is_virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        within_s = math.inf if is_virtual else LIMIT_S
    while not condition():
        assert now() - start_s < within_s, f"{what or text_of(condition)}: not within {within_s} s"
        await asyncio.sleep(every_s)
    return now() - start_s


def text_of(condition):
    """Return the condition as the test has it."""
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return "the condition"


async def in_time(waiting, what, tell=lambda: "", limit_s=LIMIT_S):
    """Await what comes at any speed, and return it; a failure is told as by `until_real`."""
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            return await waiting
    except TimeoutError:
        assert not deadline.expired(), late(what, tell, limit_s)
        raise


def late(what, tell=lambda: "", limit_s=LIMIT_S):
    return f"{what} did not come within {limit_s:.0f} s\n{tell()}"


def until_real(condition, what, tell=lambda: "", every_s=0.05):
    """Poll in real time until a condition returns something true, and return that.

    A failure says `what` was waited for, and what `tell` says of the processes behind it. A
    condition ends the wait early by an assertion of its own, such as that a process still runs.
    """
    ends_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > ends_s:
            raise AssertionError(late(what, tell))
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
        raise AssertionError(late(f"the end of {what}", tell)) from None


def output_of(process, what, tell=lambda: ""):
    """Wait for a process to end; return what its standard output still held."""
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(late(f"the end of {what}", tell)) from None


def line_of(process, what, tell=lambda: ""):
    """Return the next line of a process that says nothing more until the test goes on."""
    until_real(lambda: select.select([process.stdout], [], [], 0)[0], what, tell)
    return process.stdout.readline()


def completed(command, run=subprocess.run, limit_s=LIMIT_S, **options):
    """`subprocess.run` of a program that ends by itself."""
    try:
        return run(command, timeout=limit_s, **options)
    except subprocess.TimeoutExpired as error:
        said = b"" if error.stdout is None else error.stdout
        text = said if isinstance(said, str) else said.decode(errors="replace")
        last = "\n".join(text.splitlines()[-LAST_LINES:])
        raise AssertionError(late(f"the end of {command}", lambda: last, limit_s)) from None


def alive(pid):
    """True until the process has ended, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
