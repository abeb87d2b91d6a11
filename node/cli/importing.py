"""Importing what takes seconds beside what a user waits for."""

import contextlib
import threading
from collections.abc import Iterator
from importlib import import_module


@contextlib.contextmanager
def importing(*modules: str) -> Iterator[None]:
    """Import modules in a thread while the block runs; afterwards they are there.

    A module that cannot be imported says so where it is imported for use."""

    def load() -> None:
        with contextlib.suppress(Exception):
            for module in modules:
                import_module(module)

    # no daemon: a process that ends while a library is being loaded can crash
    thread = threading.Thread(target=load, name="imports", daemon=False)
    thread.start()
    try:
        yield
    finally:
        thread.join()
