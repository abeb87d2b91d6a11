"""The measures of a node: one set of names and units, whatever shows them."""

import msgspec

MEANINGS = {  # in the order in which they are shown
    "time_s": "The wall clock in seconds since 1970.",
    "step": "The node's own inner steps.",
    "loss": "The loss of the last batch in nats per token.",
    "tokens": "The run's tokens, as far as this node knows.",
    "tokens_per_s": "The node's own speed in tokens per second, over the last seconds.",
    "sent_bytes": "Bytes sent over the links since the node started, all protocol included.",
    "received_bytes": "Bytes received over the links since the node started.",
    "busy_share": "Share of the last seconds in which the thread that trains has computed, 0 to 1.",
    "peers": "Members of the run, this node included once it is one.",
    "rounds_ok": "Rounds applied since the node started to which every member contributed.",
    "rounds_partial": "Rounds applied since then to which some members contributed.",
    "rounds_alone": "Rounds since then for which no partner was found.",
    "rounds_failed": "Rounds since then in which nothing was agreed.",
    "evaluation_round": "The round that began with the weights of the run's newest evaluation.",
    "evaluation_loss": "The held-out loss of that evaluation in nats per token.",
    "evaluation_error": "The standard error of that loss.",
    "evaluation_bits": "That loss in bits per byte of text.",
}


class Measures(msgspec.Struct, frozen=True):
    """Measures of a node at one moment; `MEANINGS` has the units. None is what is not known yet,
    and is shown nowhere."""

    time_s: float
    step: int
    loss: float | None
    tokens: int
    tokens_per_s: float | None
    sent_bytes: int
    received_bytes: int
    busy_share: float | None
    peers: int
    rounds_ok: int
    rounds_partial: int
    rounds_alone: int
    rounds_failed: int
    evaluation_round: int | None = None
    evaluation_loss: float | None = None
    evaluation_error: float | None = None
    evaluation_bits: float | None = None


PREFIX = "farflock_"  # in Prometheus, where all programs share their names
OUTCOMES = ("ok", "partial", "alone", "failed")  # of a round: optimizers.method.Result.status
NAMES = Measures.__struct_fields__
COUNTERS = tuple(name for name in NAMES if name.endswith("_bytes") or name.startswith("rounds_"))


def prometheus_name(name: str) -> str:
    """Return a measure's name in Prometheus, whose counters end with `_total`."""
    return f"{PREFIX}{name}_total" if name in COUNTERS else f"{PREFIX}{name}"


def numbers(measures: Measures) -> dict[str, float]:
    """Return what is known by name, without the time and the step at which it was so."""
    known = {name: getattr(measures, name) for name in NAMES if name not in ("time_s", "step")}
    return {name: value for name, value in known.items() if value is not None}
