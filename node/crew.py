"""How work is given to other processes of this machine."""

import multiprocessing
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
