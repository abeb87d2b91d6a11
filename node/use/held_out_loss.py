"""The loss of a saved model on held-out text, as its run measures it: the same windows, in float32.

Beside the loss in nats per token, which is of one tokenizer, there is the one in bits per byte of
the text, by which models with different tokenizers can be compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.model.device import Device, is_out_of_memory
from farflock.node.model.evaluation import LossEstimate, sequence_means, summarise
from farflock.node.model.hf_config import CONFIG_NAME, config_in
from farflock.node.model.hf_model import AnyModel
from farflock.node.model.llama import Llama
from farflock.node.model.loss import IGNORED
from farflock.node.state.saved_model import SavedModel
from farflock.node.state.weights_file import WeightsFolder, initial
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer, read_definition
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer

AT_ONCE = 4096  # tokens, unless the device has no room for them
_CHECKPOINT_NAME = "manifest.json"  # which an export does not have

_Windows = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """A loss on held-out text: `estimate` in nats per token, over `tokens` that count."""

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


def measure_held_out(
    model: AnyModel,
    device: Device,
    windows: _Windows,
    lengths: NDArray[np.int64] | None,
    progress: Callable[[float], None] = lambda share: None,
) -> HeldOutLoss:
    """Measure a model, which is on this device, on held-out tokens and next tokens, both int64
    (n, seq). `lengths` are the bytes of text of each token (`bytes_of_tokens`), and `progress` is
    called with the share that is done. Raise torch's `OutOfMemoryError` if there is no room for one
    sequence."""
    x, y = windows
    means, total, done = list[Tensor](), 0.0, 0
    at_once = max(AT_ONCE // x.shape[1], 1)
    while done < len(x):
        rows = slice(done, done + at_once)
        losses = _losses(model, device, x[rows], y[rows], can_halve=at_once > 1)
        if losses is None:
            at_once //= 2
            continue
        means.append(sequence_means(losses, y[rows]))
        total += float(losses.double().sum())
        done = min(rows.stop, len(x))
        progress(done / len(x))
    return HeldOutLoss(
        summarise(torch.cat(means)), int((y != IGNORED).sum()), _bits_per_byte(total, y, lengths)
    )


@torch.no_grad()
def _losses(
    model: AnyModel, device: Device, x: Tensor, y: Tensor, *, can_halve: bool
) -> Tensor | None:
    """Return the loss of each token (n, seq), on the CPU; None if that takes too much memory."""
    try:
        losses: Tensor = model(x.to(device.place), y.to(device.place), "none").cpu()
    except RuntimeError as error:
        if not (is_out_of_memory(error) and can_halve):
            raise
        return None
    return losses


def _bits_per_byte(
    total: float, targets: Tensor, lengths: NDArray[np.int64] | None
) -> float | None:
    counted = targets[targets != IGNORED].numpy()
    if lengths is None or not len(counted) or counted.max() >= len(lengths):
        return None
    count = int(lengths[counted].sum())
    return total / math.log(2) / count if count else None


class _Merges(msgspec.Struct):
    vocab: dict[str, int]


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[dict[str, Any]] = []


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Definition(msgspec.Struct):
    """The fields of a tokenizer.json that say how many bytes a token is."""

    model: _Merges
    decoder: _Decoder | None = None
    added_tokens: list[_Added] = []


def bytes_of_tokens(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return how many bytes of text each token is, 0 for special ones (vocabulary,); None for a
    tokenizer of which that is not known: one that is neither bytes nor byte-level."""
    if isinstance(tokenizer, ByteTokenizer):
        lengths = np.ones(tokenizer.vocab_size, dtype=np.int64)
        lengths[tokenizer.end_of_text] = 0
        return lengths
    return _byte_level(tokenizer) if isinstance(tokenizer, JsonTokenizer) else None


def _byte_level(tokenizer: JsonTokenizer) -> NDArray[np.int64] | None:
    """Return the lengths of byte-level tokens, which are spelled with one character a byte."""
    try:
        found = msgspec.json.decode(tokenizer.raw, type=_Definition)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # another kind of model: the file itself was read before
    decoder = found.decoder
    if decoder is None or "ByteLevel" not in (
        decoder.type,
        *(each.get("type") for each in decoder.decoders),
    ):
        return None
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for name, place in found.model.vocab.items():
        lengths[place] = len(name)
    for token in found.added_tokens:
        lengths[token.id] = 0 if token.special else len(token.content.encode())
    lengths[tokenizer.end_of_text] = 0
    return lengths


class ExportedModel(SavedModel):
    """The model of a Hugging Face folder of a native architecture."""

    @cached_property
    def model(self) -> Llama:
        """The model, in memory of its own."""
        return initial(self.config, 0, WeightsFolder(self.folder, self.config)).eval()


def is_export(folder: Path) -> bool:
    """Return whether a folder holds a model in Hugging Face's form, and no checkpoint."""
    return (folder / CONFIG_NAME).is_file() and not (folder / _CHECKPOINT_NAME).exists()


def open_export(folder: Path) -> ExportedModel:
    """Return the model of a Hugging Face folder; raise `BadModelFolder` or `BadTokenizer` if it is
    not one that this version reads."""
    files = {JSON_NAME: read_definition(folder)}
    return ExportedModel(folder, config_in(folder), {}, {}, files)
