"""`[data]`: the text that a run trains on, and the tokenizer that makes it tokens.

A founder names a tokenizer by its file. A resolved manifest names it by its content: everybody can
check the file, wherever it comes from, and no manifest can name a file on a volunteer's machine.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.model.corpus import SHIPPED, BadCorpus, load_corpus
from farflock.node.run.sections import PlainText, Section
from farflock.node.state.tokenizer_cache import cached_tokenizer, keep_tokenizer
from farflock.node.tokens.json_tokenizer import (
    MAX_FILE_BYTES,
    JsonTokenizer,
    chunk_names,
    read_definition,
)
from farflock.node.tokens.tokenizer import (
    BYTES,
    MAX_VOCABULARY,
    BadTokenizer,
    ByteTokenizer,
    Tokenizer,
)
from farflock.swarm.messages import MAX_CHUNK_BYTES

MAX_TOKENIZER_CHUNKS = MAX_FILE_BYTES // MAX_CHUNK_BYTES
_FROM_FILE = ("tokenizer_bytes", "tokenizer_chunks", "vocabulary")  # what describes a file

_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_Chunks = Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_TOKENIZER_CHUNKS)]


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: the text, how it is cut into tokens, and the SHA-256 of exactly that text.

    A resolved manifest always has the hash: without it a founder could make a volunteer train on
    any local file of that name. There the tokenizer is `bytes`, or the BLAKE3 hash of its file,
    with the file's size, the hashes of its chunks, and its number of tokens."""

    corpus: PlainText = SHIPPED
    tokenizer: Annotated[str, msgspec.Meta(pattern=rf"^({BYTES}|[0-9a-f]{{64}})$")] = BYTES
    tokenizer_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILE_BYTES)] | None = None
    tokenizer_chunks: _Chunks | None = None
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=MAX_VOCABULARY)] | None = None
    sha256: _Hash

    def chunks(self) -> tuple[tuple[bytes, int], ...]:
        """Return the digest and the size of each chunk of the tokenizer's file; none for bytes."""
        left, found = self.tokenizer_bytes or 0, list[tuple[bytes, int]]()
        for name in self.tokenizer_chunks or ():
            found.append((bytes.fromhex(name), min(left, MAX_CHUNK_BYTES)))
            left -= MAX_CHUNK_BYTES
        return tuple(found)


def fill_data(table: dict[str, Any]) -> None:
    """Replace a founder's tokenizer by what its file is, kept for this node and for others; a model
    whose vocabulary is not given gets that of the tokenizer. Spell out the hash of the corpus."""
    data = table.setdefault("data", {})
    if not isinstance(data, dict):
        return  # refused by its type later
    named = data.get("tokenizer", BYTES)
    if isinstance(named, str) and named != BYTES and "tokenizer_bytes" not in data:
        data |= _described(named)
        model = table.setdefault("model", {})
        if isinstance(model, dict):
            model.setdefault("vocab_size", data["vocabulary"])
    if "sha256" not in data:
        data["sha256"] = _corpus_hash(str(data.get("corpus", SHIPPED)))


def require_tokenizer(data: DataSection, vocab_size: int) -> None:
    """Raise `Usage` unless the section describes its tokenizer wholly, and the model has as many
    tokens as that."""
    described = [name for name in _FROM_FILE if getattr(data, name) is not None]
    if len(described) != (0 if data.tokenizer == BYTES else len(_FROM_FILE)):
        other = set(_FROM_FILE) - set(described) if data.tokenizer != BYTES else described
        raise Usage(
            f"data.tokenizer: {data.tokenizer}",
            f"{', '.join(sorted(other))} do not go with it",
            "name the tokenizer's file, and leave out what describes it",
        )
    chunks = -(-(data.tokenizer_bytes or 0) // MAX_CHUNK_BYTES)
    if len(data.tokenizer_chunks or ()) != chunks:
        raise Usage(
            "data.tokenizer_chunks",
            f"a file of {data.tokenizer_bytes} bytes has {chunks} chunks",
            "name the tokenizer's file, and leave out what describes it",
        )
    vocabulary = data.vocabulary or ByteTokenizer.vocab_size
    if vocab_size < vocabulary:
        raise Usage(
            f"model.vocab_size: {vocab_size}",
            f"the tokenizer {data.tokenizer!r:.20} has {vocabulary} tokens",
            f"set it to {vocabulary} or more",
        )


def tokenizer_of(data: DataSection) -> Tokenizer:
    """Return the run's tokenizer, from the files that this machine keeps; raise `RefusedByRun` if
    it is not among them, or is not what the manifest says."""
    if data.tokenizer == BYTES:
        return ByteTokenizer()
    raw = cached_tokenizer(data.tokenizer)
    if raw is None:
        raise RefusedByRun(
            "the run's tokenizer is not on this machine",
            f"no file here has the BLAKE3 hash {data.tokenizer[:16]}…",
            "join the run by its invite, or name the tokenizer's file in its manifest",
        )
    tokenizer = JsonTokenizer(raw, origin="the run's tokenizer")
    if tokenizer.vocab_size != data.vocabulary:
        raise RefusedByRun(
            "the run's tokenizer is not what its manifest says",
            f"it has {tokenizer.vocab_size} tokens instead of {data.vocabulary}",
            "tell the run's founder",
        )
    return tokenizer


def _described(named: str) -> Mapping[str, Any]:
    """Return what a manifest says of a tokenizer's file."""
    try:
        raw = read_definition(Path(named).expanduser())
        tokenizer = JsonTokenizer(raw, origin=named)
    except BadTokenizer as error:
        raise Usage("data.tokenizer", str(error), "") from None
    keep_tokenizer(raw)
    return {
        "tokenizer": tokenizer.hash,
        "tokenizer_bytes": len(raw),
        "tokenizer_chunks": chunk_names(raw),
        "vocabulary": tokenizer.vocab_size,
    }


@functools.cache
def _corpus_hash(name: str) -> str:
    """Return the SHA-256 of a corpus; each corpus is read only once."""
    try:
        return load_corpus(name).sha256
    except BadCorpus as error:
        raise Usage("data.corpus", str(error), "") from None
