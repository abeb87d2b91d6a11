"""`[data]`: what a run trains on, named by its content and never by a place.

A founder names a folder that `farflock data prepare` made (`from`), or takes the plays that come
with Farflock (`corpus`). What others get is the root of the index: everybody can check every byte
of the data against it, wherever it comes from (node/data/index.py).
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from farflock.node.data.index import (
    INDEX_NAME,
    MAX_SOURCES,
    PIECE_BYTES,
    BadIndex,
    DataIndex,
    Hash,
    SourceName,
    read_index,
    root_of,
)
from farflock.node.errors import Usage
from farflock.node.model.corpus import SHIPPED, BadCorpus, load_corpus
from farflock.node.run.sections import PlainText, Section

BYTES = "bytes"
BYTE_VOCABULARY = 256
_PREPARE = "make one with `farflock data prepare TEXTS -o FOLDER`, and write from = 'FOLDER'"

_Weight = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Mix = Annotated[dict[SourceName, _Weight], msgspec.Meta(max_length=MAX_SOURCES)]


class DataSection(Section, frozen=True, kw_only=True):
    """[data]: what is trained on. Either the `root` of prepared data, with
    its tokenizer and its vocabulary, and how often each of its sources is drawn from (`mix`); or
    the `corpus` that comes with Farflock, with its SHA-256.

    A founder writes `from`, the folder of prepared data, in place of a root: relative to the
    manifest's own folder. A resolved manifest has no path."""

    corpus: PlainText | None = None
    tokenizer: Annotated[str, msgspec.Meta(pattern=r"^(bytes|[0-9a-f]{64})$")] = BYTES
    sha256: Hash | None = None
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=2**32)] | None = None
    root: Hash | None = None
    mix: Mix = msgspec.field(default_factory=dict)

    @property
    def is_prepared(self) -> bool:
        """True if the run trains on prepared data, and not on what comes with Farflock."""
        return self.root is not None


def fill_data(table: dict[str, Any]) -> None:
    """Replace a founder's folder by the root of what is in it, or spell out the hash of the shipped
    corpus; a model whose vocabulary is not given gets that of the data."""
    data = table["data"] = dict(table.get("data", {}))
    if "from" in data:
        _fill_prepared(data, table)
    elif "root" not in data:
        if data.get("tokenizer", BYTES) != BYTES:
            raise Usage(
                "data.tokenizer",
                f"{data['tokenizer']!r:.80} cannot be had here: the shipped corpus is bytes",
                "name it to `farflock data prepare TEXTS --tokenizer FILE -o FOLDER`, and write"
                " from = 'FOLDER'",
            )
        data.setdefault("corpus", SHIPPED)
        data.setdefault("sha256", _corpus_hash(str(data["corpus"])))


def _fill_prepared(data: dict[str, Any], table: dict[str, Any]) -> None:
    folder = folder_of_data(data)
    assert folder is not None
    for name in ("corpus", "sha256"):
        if name in data:
            raise Usage(f"data.{name}", "data.from names the data already", "leave out one of them")
    try:
        raw = index_bytes_in(folder)
        index = read_index(raw, str(folder / INDEX_NAME), data.get("root"))
    except BadIndex as error:
        raise Usage("data.from", str(error), "") from None
    del data["from"]
    _require_sources(data.get("mix"), index)
    if index.counts_answers and table.get("pipeline") is not None:
        raise Usage(
            "data.from",
            "only its answers count, and the stages of a pipeline count every token",
            "leave out [pipeline], or prepare the data without --chat",
        )
    data["root"] = root_of(raw)
    data["tokenizer"] = BYTES if index.tokenizer is None else index.tokenizer.sha256
    data["vocabulary"] = index.vocabulary
    model = table.setdefault("model", {})
    if isinstance(model, dict):
        model.setdefault("vocab_size", index.vocabulary)


def folder_of_data(data: Mapping[str, Any]) -> Path | None:
    """Return the folder that a founder's `[data]` table names, if any; raise `Usage` if that is not
    a path."""
    named = data.get("from")
    if named is None:
        return None
    if not isinstance(named, str) or not named:
        raise Usage("data.from", f"{named!r:.80} is not a path", _PREPARE)
    return Path(named).expanduser()


def index_bytes_in(folder: Path) -> bytes:
    """Return the index of a prepared folder, unread; raise `BadIndex` if there is none."""
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as stream:
            return stream.read(PIECE_BYTES + 1)
    except OSError as error:
        raise BadIndex(
            f"{folder} is no folder of prepared data ({path}: {error.strerror}); {_PREPARE}"
        ) from None


def require_data(data: DataSection, vocab_size: int) -> None:
    """Raise `Usage` unless the section names exactly one text, and one that the model can read."""
    if (data.corpus is None) == (data.root is None):
        raise Usage("data", "it names neither or both of corpus and root", _PREPARE)
    if not data.is_prepared and (data.tokenizer != BYTES or data.vocabulary or data.mix):
        raise Usage("data", "the shipped corpus is bytes, and has one source", _PREPARE)
    for name in ("vocabulary",) if data.is_prepared else ("sha256",):
        if getattr(data, name) is None:
            raise Usage(f"data.{name}", "it is missing", "give it a value")
    if data.mix and not sum(data.mix.values()) > 0:
        raise Usage("data.mix", "no source has any weight", "write it as {web = 0.7, code = 0.3}")
    vocabulary = data.vocabulary or BYTE_VOCABULARY
    if vocab_size < vocabulary:
        raise Usage(
            f"model.vocab_size: {vocab_size}",
            f"the data has a vocabulary of {vocabulary} tokens",
            f"set it to {vocabulary} or more",
        )


def _require_sources(mix: object, index: DataIndex) -> None:
    if not isinstance(mix, Mapping):
        return  # absent, or refused by its type later
    for name in mix:
        if name not in index.sources:
            known = ", ".join(sorted(index.sources))
            raise Usage("data.mix", f"the data has no source {name!r:.64}", f"it has {known}")


@functools.cache
def _corpus_hash(name: str) -> str:
    """Return the SHA-256 of a corpus; each corpus is read only once."""
    try:
        return load_corpus(name).sha256
    except BadCorpus as error:
        raise Usage("data.corpus", str(error), "") from None
