"""A check that a process of a test still runs."""

import contextlib

import psutil


def alive(pid):
    """True until the process has ended, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
