"""Pools of worker processes: they start fast, and they end with the process that started them."""

import multiprocessing
import os
import threading
from multiprocessing.context import ForkServerContext, SpawnContext


def warm(module: str) -> ForkServerContext | SpawnContext:
    """Return a context whose processes are forks of a server process that has imported `module` and
    opened nothing.

    A fork of this process may hang, because it may have threads. A start from scratch (as on
    Windows, which has no fork) imports everything again, at five CPU seconds each."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    return server


def end_with_parent() -> None:
    """End this pool worker with its parent; otherwise it would wait on the pool's queue forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process is not a worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
