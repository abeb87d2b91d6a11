"""What the constructors of methods refuse, in full sentences: options come from manifests, and a wrong one must not train."""

import math

from farflock.compression.catalog import codec

SHORTEST_S = 0.001  # a round of seconds


def require_options(method: object, instead: str | None = None, returned: str | None = "choose bf16 or fp32") -> None:
    """`ValueError` unless what a method has of the usual options makes sense: rounds have steps, or `round_s` room for some,
    waiting for an exchange ends, and not before it began, and there are such codecs. `instead` of a biased `codec`, and
    `returned` of a biased `return_codec`, are the codecs to choose; None takes it."""
    period, deadline_s, round_s = (getattr(method, name, 1) for name in ("period", "deadline_s", "round_s"))
    if period < 1:
        raise ValueError(f"a period of {period} steps makes no rounds; choose 1 or more, usually 30 to 500")
    if not 0 < deadline_s < math.inf:
        raise ValueError(f"a deadline of {deadline_s} s is none; choose a finite one above 0, usually 30")
    if round_s is not None and not SHORTEST_S <= round_s < math.inf:
        raise ValueError(
            f"round_s={round_s} makes no rounds; choose {SHORTEST_S} s or more, usually 600, or leave it out"
        )
    for role, remedy in (("codec", instead), ("return codec", returned)):
        name = getattr(method, role.replace(" ", "_"), "fp32")
        codec(name)
        if remedy is not None:
            require_unbiased(role, name, remedy)


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
