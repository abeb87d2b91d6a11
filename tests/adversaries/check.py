"""One check against liars: where it stands, and the test that fails without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """In `file`, the text `old`, which stands there once, is the check; with `new` it is gone."""

    id: str
    file: str
    old: str
    new: str
    test: str
