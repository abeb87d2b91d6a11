"""The text that a saved model is measured on: one that it was not trained on, as its tokens."""

from pathlib import Path
from typing import NamedTuple

from farflock.node.assembly.text import tokens_of
from farflock.node.data.folder import PreparedFolder
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.corpus import load_corpus, read_text
from farflock.node.model.data import evaluation_rows, evaluation_starts
from farflock.node.run.manifest import Manifest, parse
from farflock.node.state.saved_model import SavedModel
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BYTES, TokenIds

SEQ = 1024  # tokens of a sequence where no run says it, or the model's context if that is shorter
_SPLIT = "held-out"


class HeldOutText(NamedTuple):
    """Held-out sequences, each with the token behind it (n, seq + 1), and the text's name."""

    rows: TokenIds
    name: str

    @property
    def seq(self) -> int:
        """The tokens of a sequence."""
        return int(self.rows.shape[1]) - 1


def held_out_text(
    saved: SavedModel, data: Path | None, *, seq: int | None = None, sequences: int | None = None
) -> HeldOutText:
    """Return what to measure on: the held-out part of a folder of prepared data, a text file, or
    without `data` the part of its run's text that no peer trained on. There are at most `sequences`
    of `seq` tokens, spread evenly over the text; without these, as long as the run has them, and
    all. Raise `FarflockError`, `BadIndex`, `BadCorpus` or `BadData` for text that is not here, or
    that the model cannot read."""
    run = _manifest_of(saved, needed=data is None)
    seq = _seq(saved, run, seq)
    if data is not None and data.is_dir():
        return _of_folder(saved, data, seq, sequences)
    if data is not None:
        text, name = read_text(data), str(data)
    elif run is not None and run.data.corpus is not None:
        corpus = load_corpus(run.data.corpus, run.data.sha256)
        text, name = corpus.held_out, f"the held-out part of {corpus.name}"
    else:
        raise Usage(
            "--data", _unknown(saved, run), "name a folder of prepared data, or a text file"
        )
    _require_vocabulary(saved, saved.tokenizer.vocab_size, "its tokenizer")
    ids = tokens_of(text, saved.tokenizer)
    return HeldOutText(evaluation_rows(ids, seq, sequences or len(ids)), name)


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


def _unknown(saved: SavedModel, run: Manifest | None) -> str:
    if run is None:
        return f"{saved.folder} does not say what its model was trained on"
    roots = ", ".join(f"{root[:16]}…" for root in run.data.weights)
    return f"the model in {saved.folder} was trained on the prepared data {roots}"


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
