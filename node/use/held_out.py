"""The loss of a saved model on held-out text, in float32, with its standard error.

Beside the loss in nats a token, which is of one tokenizer, there is the one in bits a byte of the
text, by which models of different tokenizers compare.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.assembly.text import text_of
from farflock.node.data.folder import PreparedFolder
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.corpus import read_text
from farflock.node.model.data import evaluation_rows, evaluation_starts, inputs_and_targets
from farflock.node.model.evaluation import LossEstimate, losses, summarise
from farflock.node.model.llama import Llama
from farflock.node.run.manifest import Manifest, parse
from farflock.node.state.saved_model import SavedModel
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BYTES, TokenIds, long_text_ids

SEQ = 1024  # tokens of a sequence where no run says it, or the model's context if that is shorter
AT_ONCE = 4096  # tokens
_SPLIT = "held-out"


@dataclass(frozen=True, slots=True)
class Windows:
    """The length of a sequence in tokens, and how many are measured, spread evenly over the text;
    None: as the run does, and all."""

    seq: int | None = None
    sequences: int | None = None


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Held-out sequences, each with the token behind it (n, seq + 1), and the text's name."""

    rows: TokenIds
    name: str

    @property
    def seq(self) -> int:
        """The tokens of a sequence."""
        return int(self.rows.shape[1]) - 1


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """A loss on held-out text: `estimate` in nats a token, over `tokens`."""

    estimate: LossEstimate
    tokens: int
    bits_per_byte: float | None  # None: the tokenizer does not say how many bytes its tokens are

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite where that is too large a number."""
        try:
            return math.exp(self.estimate.mean)
        except OverflowError:
            return math.inf


def held_out_text(saved: SavedModel, data: Path | None, wanted: Windows) -> HeldOutText:
    """Return what to measure on: the held-out part of a folder of prepared data, a text file, or
    without `data` the part of its run's text that no peer trained on. Raise `FarflockError`,
    `BadIndex`, `BadCorpus` or `BadData` for text that is not here, or that the model cannot
    read."""
    run = _manifest_of(saved, needed=data is None)
    seq = _seq(saved, run, wanted.seq)
    if data is not None and data.is_dir():
        return _of_folder(saved, data, seq, wanted.sequences)
    if data is not None:
        text, name = read_text(data), str(data)
    elif run is not None:
        text, name = text_of(run.data).corpus.held_out, f"the held-out part of {run.data.corpus}"
    else:
        raise Usage(
            "--data",
            f"{saved.folder} does not say what its model was trained on",
            "name a folder of prepared data, or a text file, as in --data FOLDER",
        )
    _require_vocabulary(saved, saved.tokenizer.vocab_size, "its tokenizer")
    ids = long_text_ids(saved.tokenizer, text)
    return HeldOutText(evaluation_rows(ids, seq, wanted.sequences or len(ids)), name)


def _manifest_of(saved: SavedModel, *, needed: bool) -> Manifest | None:
    """Return the manifest of a checkpoint's run; None if it does not say, or if it is one of
    another version that is not `needed`."""
    text = saved.meta.get("manifest")
    if not isinstance(text, str) or not text:
        return None
    try:
        return parse(text)
    except RefusedByRun:
        if needed:
            raise
        return None


def _seq(saved: SavedModel, run: Manifest | None, wanted: int | None) -> int:
    context = saved.config.context
    if wanted is None:
        return min(context, SEQ) if run is None else run.train.seq
    if wanted > context:
        why = f"the model has positions for {context} tokens"
        raise Usage(f"--seq {wanted}", why, f"use {context} or less")
    return wanted


def _of_folder(saved: SavedModel, folder: Path, seq: int, sequences: int | None) -> HeldOutText:
    prepared = PreparedFolder(folder)
    index, name = prepared.index, f"the held-out part of {folder}"
    _require_tokenizer(saved, BYTES if index.tokenizer is None else index.tokenizer.hash, name)
    _require_vocabulary(saved, index.vocabulary, name)
    total = index.totals(_SPLIT).tokens
    starts = evaluation_starts(total, seq, sequences or max(total, 1))
    return HeldOutText(prepared.rows(_SPLIT, starts, seq + 1), name)


def _require_tokenizer(saved: SavedModel, wanted: str, name: str) -> None:
    """Raise `Failure` unless the text's tokens are those of the model."""
    tokenizer = saved.tokenizer
    found = tokenizer.hash if isinstance(tokenizer, JsonTokenizer) else BYTES
    if found != wanted:
        raise Failure(
            f"{name} cannot be read by the model in {saved.folder}",
            f"its tokenizer is {_short(wanted)}, and the model's {_short(found)}",
            "prepare the text with the model's own tokenizer, or name a text file with --data",
        )


def _require_vocabulary(saved: SavedModel, tokens: int, name: str) -> None:
    if tokens > saved.config.vocab_size:
        raise Failure(
            f"{name} has a vocabulary of {tokens:,} tokens",
            f"the model in {saved.folder} has only {saved.config.vocab_size:,}",
            "name data that was prepared for this model",
        )


def _short(name: str) -> str:
    return name if name == BYTES else f"{name[:16]}…"


def measure_held_out(
    model: Llama,
    text: HeldOutText,
    lengths: NDArray[np.int64] | None,
    progress: Callable[[float], None] = lambda share: None,
) -> HeldOutLoss:
    """Measure a model, on the device that it is on, on held-out text. `lengths` are the bytes of
    each token (`bytes_of_tokens`), and `progress` is called with the share that is done."""
    at_once, each, count = max(AT_ONCE // text.seq, 1), list[Tensor](), len(text.rows)
    for first in range(0, count, at_once):
        x, y = inputs_and_targets(text.rows[first : first + at_once])
        each.append(losses(model, x, y, at_once))
        progress(min((first + at_once) / count, 1.0))
    found, tokens = torch.cat(each), count * text.seq
    total = float(found.sum()) * text.seq
    return HeldOutLoss(summarise(found), tokens, _bits_per_byte(total, text.rows[:, 1:], lengths))


def _bits_per_byte(
    total: float, targets: TokenIds, lengths: NDArray[np.int64] | None
) -> float | None:
    if lengths is None:
        return None
    count = sum(int(lengths[row].sum()) for row in targets)
    return total / math.log(2) / count if count else None
