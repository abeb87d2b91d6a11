"""`[data]`: the text that a run trains on, and the tokenizer that makes it tokens.

A founder names a tokenizer by its file. A resolved manifest names it by its content: everybody can
check the file, wherever it comes from, and no manifest can name a file on a volunteer's machine.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from farflock.node.data.cursor import MAX_SOURCES
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.index import TOKENIZER_NAME
from farflock.node.data.mixture import BadMixture, shares_of
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

MAX_COPIES = 16
MAX_URLS = 8
COPIES = 2
MAX_TOKENIZER_CHUNKS = MAX_FILE_BYTES // MAX_CHUNK_BYTES
_FROM_FILE = ("tokenizer_bytes", "tokenizer_chunks", "vocabulary")  # what describes a file

_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Mix = Annotated[dict[_Hash, _Weight], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]
# https, or http on this machine; no user, query or fragment
_Url = Annotated[
    str,
    msgspec.Meta(
        max_length=512,
        pattern=r"^(https://[^\s/@?#\\]+|http://(127\.0\.0\.1|localhost)(:[0-9]+)?)(/[^\s@?#\\]*)?$",
    ),
]
_Urls = Annotated[tuple[_Url, ...], msgspec.Meta(min_length=1, max_length=MAX_URLS)]
_Chunks = Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_TOKENIZER_CHUNKS)]


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: the text, and how it is cut into tokens.

    The text is a corpus with the SHA-256 of exactly that text, the prepared data with a `root`, or
    a `mix` of several, by their weights; members keep so many `copies` of each shard beside the
    founder's, and `urls` have copies of the folders. A resolved manifest always has a hash: without
    it a founder could make a volunteer train on any local file of that name. There the tokenizer is
    `bytes`, or the BLAKE3 hash of its file, with the file's size, the hashes of its chunks, and its
    number of tokens."""

    corpus: PlainText | None = None
    root: _Hash | None = None
    mix: _Mix | None = None
    copies: Annotated[int, msgspec.Meta(ge=0, le=MAX_COPIES)] | None = None
    urls: _Urls | None = None
    tokenizer: Annotated[str, msgspec.Meta(pattern=rf"^({BYTES}|[0-9a-f]{{64}})$")] = BYTES
    tokenizer_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILE_BYTES)] | None = None
    tokenizer_chunks: _Chunks | None = None
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=MAX_VOCABULARY)] | None = None
    sha256: _Hash | None = None

    @property
    def weights(self) -> Mapping[str, float]:
        """The roots of prepared data, and the weight of each; nothing for a corpus."""
        return self.mix or ({self.root: 1.0} if self.root is not None else {})

    @property
    def tokens(self) -> int:
        """The number of tokens of the vocabulary."""
        return self.vocabulary or ByteTokenizer.vocab_size

    def chunks(self) -> tuple[tuple[bytes, int], ...]:
        """Return the digest and the size of each chunk of the tokenizer's file; none for bytes."""
        left, found = self.tokenizer_bytes or 0, list[tuple[bytes, int]]()
        for name in self.tokenizer_chunks or ():
            found.append((bytes.fromhex(name), min(left, MAX_CHUNK_BYTES)))
            left -= MAX_CHUNK_BYTES
        return tuple(found)


def fill_data(table: dict[str, Any], prepared: Sequence[Path] = ()) -> None:
    """Replace a founder's tokenizer by what its file is, kept for this node and for others; a model
    whose vocabulary is not given gets that of the tokenizer. Spell out the hash of the corpus, or
    what is in the folders of prepared data."""
    data = table.setdefault("data", {})
    if not isinstance(data, dict):
        return  # refused by its type later
    named = data.get("tokenizer", BYTES)
    if prepared:
        _fill_prepared(data, [PreparedFolder(folder) for folder in prepared])
    elif isinstance(named, str) and named != BYTES and "tokenizer_bytes" not in data:
        data |= _described(Path(named).expanduser(), named)
    if "vocabulary" in data:
        model = table.setdefault("model", {})
        if isinstance(model, dict):
            model.setdefault("vocab_size", data["vocabulary"])
    if not data.keys() & {"root", "mix"}:
        data.setdefault("corpus", SHIPPED)
    if "corpus" in data and "sha256" not in data:
        data["sha256"] = _corpus_hash(str(data["corpus"]))


def _fill_prepared(data: dict[str, Any], found: Sequence[PreparedFolder]) -> None:
    """Spell out the roots of prepared data, unless the founder named them, and their tokenizer."""
    if not data.keys() & {"root", "mix"}:
        if len(found) == 1:
            data["root"] = found[0].root
        else:  # all their samples weigh alike
            data["mix"] = {each.root: float(each.index.totals("train").tokens) for each in found}
    data.setdefault("copies", COPIES)
    first = found[0].index
    for other in found[1:]:
        if (other.index.tokenizer, other.index.end_of_text) != (first.tokenizer, first.end_of_text):
            why = f"{other.folder} has another tokenizer than {found[0].folder}"
            raise Usage("--data", why, "prepare all of them with one tokenizer")
    described: Mapping[str, Any] = {"tokenizer": BYTES}
    if first.tokenizer is not None:
        path = found[0].folder / TOKENIZER_NAME
        described = _described(path, str(path))
        if described["tokenizer"] != first.tokenizer.hash:
            raise Usage(str(path), "it is damaged", "copy it again, or prepare the data again")
    if data.get("tokenizer", described["tokenizer"]) != described["tokenizer"]:
        raise Usage("data.tokenizer", "prepared data have another one", "leave it out")
    data |= described


def require_text(data: DataSection) -> None:
    """Raise `Usage` unless the section names one text: a corpus with its hash, or prepared data."""
    named = [name for name in ("corpus", "root", "mix") if getattr(data, name) is not None]
    if len(named) != 1:
        why = f"it names {' and '.join(named) or 'no text'}"
        raise Usage("[data]", why, "name one of corpus, root and mix")
    if data.corpus is not None and data.urls is not None:
        raise Usage("data.urls", "a corpus lies at no URL", "leave it out, or prepare the text")
    if (data.corpus is None) != (data.sha256 is None):
        raise Usage("data.sha256", "it goes with a corpus", "name both or neither")
    try:
        shares_of(tuple(data.weights.values()) or (1.0,))
    except BadMixture as error:
        raise Usage("data.mix", str(error), "") from None


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
    if vocab_size < data.tokens:
        raise Usage(
            f"model.vocab_size: {vocab_size}",
            f"the tokenizer {data.tokenizer!r:.20} has {data.tokens} tokens",
            f"set it to {data.tokens} or more, or name the model's own tokenizer",
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


def _described(path: Path, origin: str) -> Mapping[str, Any]:
    """Return what a manifest says of a tokenizer's file."""
    try:
        raw = read_definition(path)
        tokenizer = JsonTokenizer(raw, origin=origin)
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
