"""Which files of ours one piece of work enters, in order: watched by a profiler, told apart by context.

What a piece of work does is spread over tasks, worker threads and other peers' messages, while timers
and other work run in between. A context variable marks it: tasks inherit the mark, worker threads get
it by `carried`, and a message marks the task that received it until the next one comes.
"""

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Trace:
    """The files under some folders that marked work enters while the trace is `on`."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders, self.on = tuple(f"{folder}/" for folder in folders), False
        self.entered: dict[str, list[str]] = {}  # by file, the functions, in order
        self.mark: contextvars.ContextVar[bool] = contextvars.ContextVar("mark", default=False)
        self._ours: dict[str, str | None] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator["Trace"]:
        """Watch this thread and those that begin inside the block."""
        before = sys.getprofile()
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield self
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(before)

    def carried(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """The same work, for a thread that does not inherit the context."""
        context = contextvars.copy_context()
        return lambda: context.run(work)

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self.on:
            return
        if frame.f_code.co_code[frame.f_lasti + 1] & 3:  # RESUME after an await or a yield: it was entered before
            return
        name = self._name(frame.f_code.co_filename)
        if name is not None and self.mark.get():
            functions = self.entered.setdefault(name, [])
            if frame.f_code.co_qualname not in functions:
                functions.append(frame.f_code.co_qualname)

    def _name(self, file: str) -> str | None:
        """The file's path in the repository, if it is in one of the folders."""
        if file not in self._ours:
            path = Path(file).resolve()
            inside = path.is_relative_to(ROOT) and str(path.relative_to(ROOT))
            self._ours[file] = inside if inside and inside.startswith(self.folders) else None
        return self._ours[file]
