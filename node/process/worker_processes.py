"""How work is given to other processes of this machine."""

import multiprocessing
import os
import threading
from multiprocessing.context import ForkServerContext, SpawnContext


def warm(module: str) -> ForkServerContext | SpawnContext:
    """Makes processes that are forks of one which has imported this module and opened nothing.

    A fork of this process, which may have threads, may hang; a process from scratch imports everything anew, five seconds of
    processor each. Where there are no forks (Windows), that is what happens.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    return server


def end_with_parent() -> None:
    """For a worker of a pool: end when its parent does, however that ends; it would wait for the pool's queue for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process is no worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
