"""The words of a manifest as people write them: names from other programs, and counts such as 2M.

Only what a user writes passes through here. A resolved manifest always has Farflock's own names and
whole numbers.
"""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from farflock.node.errors import nearest

PERIOD = "method.options.period"
ALIASES = {  # a name from other programs, in lower case: the place of the same value here
    "batch_size": "train.batch",
    "micro_batch_size": "train.batch",
    "seq_len": "train.seq",
    "seq_length": "train.seq",
    "sequence_length": "train.seq",
    "block_size": "train.seq",
    "gradient_accumulation_steps": "train.accumulate",
    "grad_accum": "train.accumulate",
    "learning_rate": "train.lr",
    "max_lr": "train.lr",
    "min_lr": "train.min_lr_ratio",
    "warmup": "train.warmup_tokens",
    "warmup_steps": "train.warmup_tokens",
    "optim": "train.optimizer",
    "wd": "train.weight_decay",
    "grad_clip": "train.clip",
    "clip_norm": "train.clip",
    "max_grad_norm": "train.clip",
    "tokens": "run.total_tokens",
    "max_tokens": "run.total_tokens",
    "max_steps": "run.total_tokens",
    "epochs": "run.total_tokens",
    "num_epochs": "run.total_tokens",
    "vocab": "model.vocab_size",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "n_embd": "model.dim",
    "n_layers": "model.layers",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_heads": "model.heads",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn_dim",
    "max_seq_len": "model.context",
    "context_length": "model.context",
    "dataset": "data.corpus",
    "h": PERIOD,
    "inner_steps": PERIOD,
    "local_steps": PERIOD,
    "sync_every": PERIOD,
    "compression": "exchange.codec",
    "timeout_s": "exchange.deadline_s",
    "min_peers": "exchange.start_peers",
}
VALUE_ALIASES = {"adam": "adamw"}  # where the nearest spelling would be another optimizer
COUNTS = (("run", "total_tokens"), ("train", "warmup_tokens"))
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([kmbt])?", re.ASCII | re.IGNORECASE)
_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MAX_COUNT_CHARS = 32  # longer numbers are not counts of anything


def place_of(word: str) -> str | None:
    """Return the place of the value that other programs call `word`; None if it is unknown."""
    return ALIASES.get(word.lower())


def near_key(word: str, table: str, keys: Iterable[str]) -> str:
    """Return the remedy for an unknown key of a table, as a clause; `table` is "" for the root."""
    known, place = sorted(keys), place_of(word)
    if place is None:
        return nearest(word, known)
    own, _, key = place.rpartition(".")
    if own == table and key in known:
        return f"did you mean {key!r}?"
    return nearest(word, known) if own == table else f"did you mean {place!r}?"


def near_option(word: str, options: Iterable[str]) -> str:
    """Return the remedy for an unknown option of a method, as a clause."""
    known, place = sorted(options), place_of(word)
    own, _, key = (place or "").rpartition(".")
    if place is None or (own == "method.options" and key not in known):
        return nearest(word, known)
    return f"{word!r} is called {(key if key in known else place)!r} here"


def near_value(word: str, choices: Iterable[str]) -> str:
    """Return the remedy for an unknown value, as a clause."""
    known, meant = sorted(choices), VALUE_ALIASES.get(word.lower())
    return f"did you mean {meant!r}?" if meant in known else nearest(word, known)


def spell_counts(table: Mapping[str, Any]) -> None:
    """Replace counts of tokens such as "500k", "2M", "1B" and 1e9 by whole numbers.

    Anything else is left in place, to be reported when the table is checked.
    """
    for section, key in COUNTS:
        values = table.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = count_of(values[key])


def count_of(value: object) -> object:
    """Return the whole number that a value stands for; return any other value unchanged."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if not isinstance(value, str) or len(value) > _MAX_COUNT_CHARS:
        return value
    found = _COUNT.fullmatch(value.strip())
    if found is None:
        return value
    number = Fraction(found[1].replace("_", "")) * _FACTORS.get((found[2] or "").lower(), 1)
    return int(number) if number.denominator == 1 else value
