"""What the constructors of methods refuse, in full sentences: options come from manifests, and a wrong one must not train."""

import math

from farflock.compression.catalog import codec


def require_period(period: int) -> None:
    """`ValueError` unless rounds have steps."""
    if period < 1:
        raise ValueError(f"a period of {period} steps makes no rounds; choose 1 or more, usually 30 to 500")


def require_deadline(deadline_s: float) -> None:
    """`ValueError` unless waiting for an exchange ends, and not before it began."""
    if not 0 < deadline_s < math.inf:
        raise ValueError(f"a deadline of {deadline_s} s is none; choose a finite one above 0, usually 30")


def require_codec(name: str) -> None:
    """`ValueError` with the nearest valid choice unless there is such a codec."""
    codec(name)


def require_unbiased(role: str, name: str, instead: str) -> None:
    """`ValueError` if a codec loses mass systematically (sparse, sign): a mean of its payloads alone is wrong."""
    if codec(name).biased:
        raise ValueError(f"{role} {name} is biased: what it leaves out would never arrive; {instead}")


def require_feedback(name: str, decay: float | None, instead: str) -> None:
    """`ValueError` if the decay of an error feedback is none, or if there is no feedback (None) and the codec needs one."""
    if decay is None:
        require_unbiased("codec", name, f"give it feedback, e.g. feedback=0.9, or choose {instead}")
    elif not 0 <= decay <= 1:
        raise ValueError(f"feedback of {decay} is no decay; choose one in [0, 1], usually 0.9, or None")
