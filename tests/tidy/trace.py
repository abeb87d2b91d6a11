"""The files of ours that one piece of work enters, in order, as a profiler sees them.

What a piece of work does is spread over tasks, worker threads and other peers' messages, while
timers and other work run in between. A context variable marks it: tasks inherit the mark, worker
threads get it by `carried`, and a message marks the task that received it until the next one.
"""

import contextlib
import contextvars
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Trace:
    """The files under some folders that marked work enters while the trace is `on`.

    It is on from the first call of the function `begin` (a qualified name) to the first call of
    `end` after it, if they are given.
    """

    def __init__(self, folders, *, begin="", end="", marked=True):
        self.folders, self.on = tuple(f"{folder}/" for folder in folders), False
        self.entered: dict[str, list[str]] = {}  # by file, the functions, in order
        self.mark = contextvars.ContextVar("mark", default=marked)
        self._begin, self._end, self._ours = begin, end, {}

    @contextlib.contextmanager
    def watching(self):
        """Watch this thread and those that begin inside the block."""
        before = sys.getprofile()
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield self
        finally:
            threading.setprofile(None)
            sys.setprofile(before)

    def carried(self, work):
        """The same work, for a thread that does not inherit the context."""
        context = contextvars.copy_context()
        return lambda: context.run(work)

    def _called(self, frame, event, arg):
        code = frame.f_code
        # RESUME after an await: it was entered before
        if event != "call" or code.co_code[frame.f_lasti + 1] & 3:
            return
        if code.co_qualname == self._begin:
            self.on, self._begin = True, ""
        name = self._name(code) if self.on and self.mark.get() else None
        if name is not None:
            functions = self.entered.setdefault(name, [])
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)
        if self.on and code.co_qualname == self._end:
            self.on = False

    def _name(self, code):
        """The file's path in the repository, if it is in one of the folders and not at import."""
        file = code.co_filename
        if file not in self._ours:
            path = Path(file).resolve()
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).as_posix()
            self._ours[file] = inside if inside and inside.startswith(self.folders) else None
        return None if code.co_name == "<module>" else self._ours[file]
