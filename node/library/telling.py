"""Warnings that show the line of the user's program, and not one of ours."""

import sys
import warnings


def tell(message: str) -> None:
    """Warn with one sentence, as from the first line outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("farflock"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
