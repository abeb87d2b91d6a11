"""The number of steps that a node has trained in a run, kept on disk after each one.

A checkpoint is older than the death of its node. A node that rejoins a run goes on at the sample
after the last one that it trained, since the others have got what it learnt from those before.
"""

import contextlib
import os
import struct

from farflock.node.state.paths import NO_LINK, RunFolder

_FORMAT = struct.Struct("<32sQ")  # the run's id and the steps


class SampleCursor:
    """The cursor of one run in a node's folder. Writing takes microseconds: the system may lose
    the last seconds of it in a power cut, but not when the process is killed."""

    def __init__(self, folder: RunFolder, run: str) -> None:
        self._run = run.encode()
        self._path = folder.path / "samples"
        self._file: int | None = None

    def read(self) -> int:
        """Return the number of steps trained in this run; 0 if it is not known."""
        try:
            run, steps = _FORMAT.unpack(self._path.read_bytes())
        except (OSError, struct.error):
            return 0
        return int(steps) if run == self._run else 0

    def write(self, steps: int) -> None:
        """Keep the number of steps; a full disk must not end the node."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o644)
            os.pwrite(self._file, _FORMAT.pack(self._run, steps), 0)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
