"""A worker of the start benchmark: `farflock` itself, which notes when it first says anything.

`python -m farflock.experiments.bench.workers.started_command NOTES ARGUMENTS…`. The file NOTES gets
two JSON arrays of processor seconds, imported modules, and whether torch is imported: at the first
byte of output, and at the end.
"""

import atexit
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from farflock.node.cli.main import main


def note(path: Path) -> None:
    """Append what this process has taken so far."""
    with path.open("a") as file:
        taken = (time.process_time(), len(sys.modules), "torch" in sys.modules)
        file.write(json.dumps(taken) + "\n")


class Watched:
    """A text stream that notes its first write; all else is the stream's own."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._path = stream, path

    def write(self, text: str) -> int:
        """Write, and note it once for both streams."""
        if not self._path.exists():
            note(self._path)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


if __name__ == "__main__":
    notes = Path(sys.argv[1])
    atexit.register(note, notes)
    sys.stdout = Watched(sys.stdout, notes)
    sys.stderr = Watched(sys.stderr, notes)
    main(sys.argv[2:])
