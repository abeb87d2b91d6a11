"""Checks of method options, with errors in full sentences: options come from manifests, and wrong
ones must not train."""

import math

from farflock.compression.catalog import codec

SHORTEST_S = 0.001  # the shortest `round_s`


def require_options(
    method: object, instead: str | None = None, returned: str | None = "choose bf16 or fp32"
) -> None:
    """Raise `ValueError` if a usual option that the method has is invalid: `period`, `round_s`,
    `deadline_s` or a codec. `instead` names the codecs to choose in place of a biased `codec`,
    `returned` of a biased `return_codec`; None accepts a biased one."""
    period, deadline_s, round_s = (
        getattr(method, name, 1) for name in ("period", "deadline_s", "round_s")
    )
    if period < 1:
        raise ValueError(
            f"a period of {period} steps is out of range; choose 1 or more, usually 30 to 500"
        )
    if not 0 < deadline_s < math.inf:
        raise ValueError(
            f"a deadline of {deadline_s} s is out of range; choose a finite one above 0, usually 30"
        )
    if round_s is not None and not SHORTEST_S <= round_s < math.inf:
        raise ValueError(
            f"round_s={round_s} is out of range; "
            f"choose {SHORTEST_S} s or more, usually 600, or leave it out"
        )
    for role, remedy in (("codec", instead), ("return codec", returned)):
        name = getattr(method, role.replace(" ", "_"), "fp32")
        codec(name)
        if remedy is not None:
            require_unbiased(role, name, remedy)


def require_unbiased(role: str, name: str, instead: str) -> None:
    """Raise `ValueError` if a codec loses mass systematically (sparse, sign): the mean of its
    payloads alone is wrong."""
    if codec(name).biased:
        raise ValueError(
            f"{role} {name} is biased: what it leaves out would never arrive; {instead}"
        )


def require_feedback(name: str, decay: float | None, instead: str) -> None:
    """Raise `ValueError` for an invalid decay, or None (no feedback) with a codec that needs it."""
    if decay is None:
        require_unbiased("codec", name, f"give it feedback, e.g. feedback=0.9, or choose {instead}")
    elif not 0 <= decay <= 1:
        raise ValueError(
            f"feedback of {decay} is out of range; choose one in [0, 1], usually 0.9, or None"
        )
