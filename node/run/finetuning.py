"""The manifest that `farflock finetune` writes: adapters for a model, trained on conversations.

Everything in it can be changed like in any other manifest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflock.node.data.index import DataIndex
from farflock.node.errors import Usage
from farflock.node.model.llama import ModelConfig
from farflock.node.model.lora import ADAPTER_TARGETS, ATTENTION_TARGETS

MAX_FINETUNING_SEQ = 1024  # tokens, if nothing else is said: answers are short
MIN_ROUNDS = 20  # in the whole run, if it is short
MAX_PERIOD = 50  # steps of a round
EVALUATIONS = 10  # in a run


@dataclass(frozen=True, slots=True)
class Finetuning:
    """The training of adapters. `targets` are all layers that can have adapters, and `alpha` twice
    the rank, if they are None; `seq` is in tokens, `epochs` are passes over the data of all peers
    together."""

    name: str = "finetune"
    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    epochs: float = 1.0
    batch: int = 8
    seq: int | None = None
    lr: float = 2e-4


def finetuning_tables(
    terms: Finetuning, base: Path, config: ModelConfig, data: Path, index: DataIndex
) -> dict[str, Any]:
    """Return the tables of a founder's manifest; raise `Usage` if the data have fewer tokens than
    one step takes."""
    tokens = sum(source.tokens for source in index.sources.values())
    seq = terms.seq or min(MAX_FINETUNING_SEQ, config.context, max(tokens // terms.batch - 1, 1))
    total, step = int(terms.epochs * tokens), terms.batch * seq
    if total < step:
        raise Usage(
            "--data",
            f"{terms.epochs:g} epochs of {tokens:,} tokens are less than a step of {terms.batch}"
            f" sequences of {seq} tokens",
            "add data or epochs, or lower --batch or --seq",
        )
    steps = total // step
    period = max(1, min(MAX_PERIOD, steps // MIN_ROUNDS))
    targets = ADAPTER_TARGETS if config.experts is None else ATTENTION_TARGETS
    lora = {
        "r": terms.rank,
        "alpha": 2.0 * terms.rank if terms.alpha is None else terms.alpha,
        "targets": list(terms.targets or targets),
    }
    return {
        "run": {"name": terms.name, "total_tokens": total},
        "model": {"from": str(base)},
        "data": {"from": str(data)},
        "train": {
            "batch": terms.batch,
            "seq": seq,
            "lr": terms.lr,
            "weight_decay": 0.0,
            "lora": lora,
        },
        "method": {"name": "diloco", "options": {"period": period}},
        "evaluation": {"every": max(1, steps // period // EVALUATIONS)},
    }
