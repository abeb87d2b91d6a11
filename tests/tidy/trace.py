"""Which files a piece of work goes through, read off a run of it."""

import contextlib
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def entered(folders, begin="", end=""):
    """A list of the modules below these folders whose functions are called inside the block, in the order of their first
    call. With `begin` and `end`, qualified names of functions such as `Trainer.run`, only from the first call of the one
    to the first call of the other after it. All threads that start inside the block are followed."""
    modules, places, found, is_on = [], {}, set(), not begin

    def called(frame, event, _):
        nonlocal is_on
        if event != "call":
            return
        code = frame.f_code
        if code not in places:
            places[code] = _module(code, folders)
        if not is_on:
            is_on = bool(begin) and code.co_qualname == begin
        if is_on and (module := places[code]) is not None and module not in found:
            found.add(module)
            modules.append(module)
        if is_on and end and code.co_qualname == end:
            finish()

    def finish():
        sys.setprofile(None)
        threading.setprofile(None)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield modules
    finally:
        finish()


def _module(code, folders):
    """The file of a function below one of the folders, as `node/loop.py`; None for others, and for what importing runs."""
    path = Path(code.co_filename).resolve()
    if code.co_name == "<module>" or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith(tuple(f"{folder}/" for folder in folders)) else None
