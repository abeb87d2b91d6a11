"""The argument of commands that take an invite: the invite itself, a file with it, or `-`.

The command line of a process is shown to every user of its machine (`ps`), and an invite is the
only secret of a run. A file and standard input keep it between its owner and Farflock.
"""

import os
import sys
from pathlib import Path
from typing import TextIO

from farflock.node.errors import Usage
from farflock.node.run.invite import MAX_CHARS, PREFIX

STDIN = "-"


def read_invite(word: str) -> str:
    """Return the invite that this argument gives; raise `Usage` if it gives none."""
    if word == STDIN:
        from farflock.node.process.torchrun import place_of

        if place_of(os.environ) is not None:
            raise Usage(
                "the invite cannot come from standard input here",
                "torchrun starts several processes, and only one could read it",
                "put it into a file, and name that",
            )
        return _first_line(sys.stdin)
    if word.strip().startswith(PREFIX):
        return word
    try:
        with Path(word).open(encoding="utf-8", errors="replace") as file:
            return _first_line(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError as error:
        raise Usage(
            f"the invite cannot be read from {word}", str(error.strerror).lower(), "name a file"
        ) from None
    raise Usage(
        "this is not an invite",
        f"it does not begin with {PREFIX!r}, and no file has this name",
        "copy the whole word that `farflock run` printed, or name a file that holds it",
    )


def _first_line(file: TextIO) -> str:
    return file.readline(MAX_CHARS + 2).strip()  # one more than an invite and its line's end
