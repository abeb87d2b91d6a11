"""Checks of the laws of methods and codecs, for their authors. Each name loads when first used.

docs/how-to/new-method.md and docs/how-to/new-codec.md show how to use them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflock.compression.check import CodecLawBroken, check_codec
    from farflock.node.simulate.method_check import check_method
    from farflock.optimizers.testing.check import LawBroken

__all__ = ["CodecLawBroken", "LawBroken", "check_codec", "check_method"]

_WHERE = {
    "CodecLawBroken": "farflock.compression.check",
    "LawBroken": "farflock.optimizers.testing.check",
    "check_codec": "farflock.compression.check",
    "check_method": "farflock.node.simulate.method_check",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
