"""The held-out text of `farflock evaluate`, and what is said of the loss on it."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflock.node.errors import Failure, Usage

if TYPE_CHECKING:
    from farflock.node.data.index import DataIndex
    from farflock.node.data.local_data import LocalData
    from farflock.node.run.manifest import Manifest
    from farflock.node.state.saved_model import SavedModel
    from farflock.node.tokens.tokenizer import TokenIds
    from farflock.node.use.held_out_loss import HeldOutLoss

ALL = "all"
SEQ_OF_EXPORTS = 2048  # tokens, or the model's context if that is shorter


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Held-out tokens, the name of what they are from, and the windows of it that are measured."""

    tokens: "TokenIds"
    name: str
    seq: int
    sequences: int


def manifest_of(saved: "SavedModel") -> "Manifest | None":
    """Return the manifest of a checkpoint's run; None if it does not say."""
    from farflock.node.run.manifest import parse

    text = saved.meta.get("manifest")
    return parse(text) if isinstance(text, str) and text else None


def held_out_text(
    saved: "SavedModel", folder: Path | None, seq: int | None, sequences: str | None
) -> HeldOutText:
    """Return what to measure on: what the run itself does, unless something else is named. Raise
    `FarflockError` or `BadIndex` for text that is not here, or that the model cannot read."""
    from farflock.node.run.evaluation_section import SEQUENCES

    run = manifest_of(saved)
    tokens, name = _prepared(saved, folder) if folder is not None else _own(saved, run)
    if len(tokens) == 0:
        raise Failure(
            f"{name} has no held-out text",
            "nothing was left out of training",
            "prepare it again with --held-out above 0, or name other data with --data",
        )
    if seq is None:
        seq = run.train.seq if run is not None else min(saved.config.context, SEQ_OF_EXPORTS)
    if seq > saved.config.context:
        why = f"the model has positions for {saved.config.context} tokens"
        raise Usage(f"--seq {seq}", why, f"use {saved.config.context} or less")
    usual = run.evaluation.sequences if run is not None else SEQUENCES
    return HeldOutText(tokens, name, seq, _count(sequences, usual, len(tokens)))


def _count(given: str | None, usual: int, tokens: int) -> int:
    if given is None:
        return usual
    if given == ALL:
        return tokens  # at most: there are not so many windows
    if not (given.isascii() and given.isdecimal() and 0 < len(given) <= 18 and int(given)):
        why = "it is neither a number above 0 nor all"
        raise Usage(f"--sequences {given[:40]!r}", why, "write it as in 64, or all")
    return int(given)


def _own(saved: "SavedModel", run: "Manifest | None") -> "tuple[TokenIds, str]":
    """Return the held-out text of the checkpoint's run."""
    from farflock.node.assembly.text import held_out_here, shipped_tokens

    if run is None:
        raise Usage(
            "--data",
            f"{saved.folder} does not say what its model was trained on",
            "name prepared data, as in --data FOLDER",
        )
    if run.data.root is None:
        _require_tokenizer(saved, None, "the shipped corpus")
        return held_out_here(run.data, shipped_tokens(run.data)), str(run.data.corpus)
    return _held_out_of(saved, run.data.root, [], "the run's data")


def _prepared(saved: "SavedModel", folder: Path) -> "tuple[TokenIds, str]":
    """Return the held-out text of a folder of prepared data."""
    from farflock.node.data.index import root_of
    from farflock.node.run.data_section import index_bytes_in

    root = root_of(index_bytes_in(folder))
    return _held_out_of(saved, root, [folder], str(folder))


def _held_out_of(
    saved: "SavedModel", root: str, folders: list[Path], name: str
) -> "tuple[TokenIds, str]":
    from farflock.node.data.index import read_index
    from farflock.node.data.local_data import LocalData
    from farflock.node.state.paths import data_cache

    local = LocalData(root, folders, data_cache())
    raw = local.index_bytes()
    if raw is None:
        raise Failure(
            f"{name} is not on this machine", f"no copy of {root} is here", "name one with --data"
        )
    index = read_index(raw, name, root)
    _require_tokenizer(saved, None if index.tokenizer is None else index.tokenizer.sha256, name)
    if index.vocabulary > saved.config.vocab_size:
        raise Failure(
            f"{name} has a vocabulary of {index.vocabulary:,} tokens",
            f"the model in {saved.folder} has only {saved.config.vocab_size:,}",
            "name data that was prepared for this model",
        )
    return _opened(index, local, name), name


def _opened(index: "DataIndex", local: "LocalData", name: str) -> "TokenIds":
    """Return the held-out tokens; what is trained on need not be here."""
    from farflock.node.data.index import require_sizes
    from farflock.node.data.sequences import ShardedText, held_out_tokens

    shards = tuple(shard for source in index.sources.values() for shard in source.held_out)
    require_sizes(shards, index)
    lacking = sum(not local.has(shard) for shard in shards)
    if lacking:
        raise Failure(
            f"the held-out text of {name} is not all here",
            f"{lacking} of {len(shards)} shards are missing or damaged",
            "name a whole copy of the data with --data",
        )
    return held_out_tokens(ShardedText(index, {}, None, lambda shard: local.opened(shard, index)))


def _require_tokenizer(saved: "SavedModel", wanted: str | None, name: str) -> None:
    """Raise `Failure` unless the text's tokens are those of the model; `wanted` is the SHA-256 of
    the text's tokenizer, None for bytes."""
    from farflock.node.model.export import byte_level

    raw = saved.tokenizer_json
    found = None if raw is None or raw == byte_level() else hashlib.sha256(raw).hexdigest()
    if found != wanted:
        here, there = (
            "bytes" if one is None else f"tokenizer {one[:16]}" for one in (found, wanted)
        )
        raise Failure(
            f"{name} cannot be read by the model in {saved.folder}",
            f"it has tokens of {there}, and the model reads {here}",
            "prepare the text with the model's own tokenizer, and name it with --data",
        )


def held_out_loss(
    saved: "SavedModel", text: HeldOutText, device: str, progress: Callable[[float], None]
) -> "HeldOutLoss":
    """Measure the model on a device of this machine."""
    from farflock.node.model.data import evaluation
    from farflock.node.model.device import choose
    from farflock.node.model.step_options import logits_on
    from farflock.node.state.checkpoint import CheckpointError
    from farflock.node.use.held_out_loss import bytes_of_tokens, measure_held_out

    chosen, lengths = choose(device), None
    windows = evaluation(text.tokens, text.seq, text.sequences)
    model = saved.model.to(chosen.place)
    model.logits_at_once = logits_on(chosen)
    with contextlib.suppress(CheckpointError):  # the loss itself needs no tokenizer
        lengths = bytes_of_tokens(saved.tokenizer)
    return measure_held_out(model, chosen, windows, lengths, progress)


def facts_of(
    saved: "SavedModel", text: HeldOutText, found: "HeldOutLoss", seconds: float
) -> dict[str, Any]:
    """Return the result as JSON has it."""
    estimate = found.estimate
    return {
        "checkpoint": str(saved.folder),
        "data": text.name,
        "loss": estimate.mean,
        "standard_error": estimate.standard_error,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "sequences": estimate.sequences,
        "seq": text.seq,
        "seconds": round(seconds, 3),
    }


def words_of(text: HeldOutText, found: "HeldOutLoss", seconds: float) -> str:
    """Return the result in words."""
    estimate = found.estimate
    error = f" ± {estimate.standard_error:.4f}" if math.isfinite(estimate.standard_error) else ""
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
    return (
        f"held-out loss: {estimate.mean:.4f}{error} nats per token\n"
        f"perplexity: {found.perplexity:,.2f}{bits}\n"
        f"measured on {found.tokens:,} tokens, in {estimate.sequences:,} sequences of"
        f" {text.seq:,}, of {text.name}, in {seconds:.1f} s"
    )
