"""Measures of a node that trains, and whose they are."""

from farflock.node.sinks.feed import Origin
from farflock.node.sinks.measures import Measures

RUN, PEER = "9ab3" * 16, "12D3KooWabcdefgh"


def measured(step=7, **known):
    """Measures with another value under each name, but for those given."""
    values = {
        "time_s": 1_795_419_132.5 + step,
        "step": step,
        "loss": 2.25,
        "tokens": 61_440,
        "tokens_per_s": 5120.5,
        "sent_bytes": 940_001,
        "received_bytes": 939_002,
        "busy_share": 0.75,
        "peers": 3,
        "rounds_ok": 11,
        "rounds_partial": 2,
        "rounds_alone": 1,
        "rounds_failed": 4,
        "evaluation_round": 40,
        "evaluation_loss": 2.5,
        "evaluation_error": 0.01,
        "evaluation_bits": 3.6,
    }
    return Measures(**{**values, **known})


def origin_in(folder):
    """The origin of measures of a node in this folder."""
    return Origin(folder, RUN, PEER)
