"""The remedy for a misspelt name: the nearest one that exists, so that nobody has to look it up."""

import difflib
from collections.abc import Iterable

_LOOKED_AT = 64  # characters: the name may come from a stranger


def nearest(word: str, choices: Iterable[str]) -> str:
    """A clause for an error message."""
    names = sorted(choices)
    close = difflib.get_close_matches(word[:_LOOKED_AT], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names) or 'none'}"
