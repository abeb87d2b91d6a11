"""Text to train on and text held out: the shipped plays of Shakespeare, or a user's own file.

Every peer of a run must have the same text. Its hash is checked on loading. The corpus itself fixes
which part is held out; that part is never drawn at random.
"""

import hashlib
import lzma
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

SHIPPED = "shakespeare"
HELD_OUT_SHARE = 0.05  # the end of a user's file
MIN_HELD_OUT_BYTES = 256
MAX_TEXT_BYTES = 1 << 30  # it is in memory whole


class BadCorpus(ValueError):
    """A corpus that is missing, damaged or too small; the message names the remedy."""


class Play(msgspec.Struct, frozen=True):
    """The place of one play in the shipped text; the plays are in order."""

    title: str
    size_bytes: int
    held_out: bool


class About(msgspec.Struct, frozen=True):
    """The content of shakespeare.json, which describes shakespeare.txt.xz."""

    source: str
    licence: str
    sha256: str
    size_bytes: int
    plays: tuple[Play, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A training text and a separate held-out text; `sha256` is that of the text before the cut."""

    name: str
    train: str
    held_out: str
    held_out_titles: tuple[str, ...]
    sha256: str


def load_corpus(name: str, sha256: str | None = None) -> Corpus:
    """Return the corpus `shakespeare`, or the one in a UTF-8 .txt file; raise `BadCorpus`.

    `sha256` is the manifest's hash of the whole text: any other text is refused.
    """
    if name == SHIPPED:
        corpus = shakespeare(files("farflock.node") / "texts")
    elif name.endswith(".txt"):
        corpus = from_file(Path(name))
    else:
        raise BadCorpus(
            f"the corpus {name!r} is neither {SHIPPED!r} nor the path of a .txt file; "
            "name one of them"
        )
    if sha256 is not None:
        remedy = "get the run's text from its founder, or the same version of Farflock"
        _require_hash(corpus.sha256, sha256, f"the corpus {name}", remedy)
    return corpus


def shakespeare(folder: Traversable) -> Corpus:
    """Return the shipped plays, with some held out whole; raise `BadCorpus` if the files were
    altered."""
    try:
        about = msgspec.json.decode((folder / "shakespeare.json").read_bytes(), type=About)
        packed = (folder / "shakespeare.txt.xz").read_bytes()
        text = lzma.LZMADecompressor().decompress(packed, max_length=about.size_bytes + 1)
    except (OSError, EOFError, lzma.LZMAError, msgspec.MsgspecError) as error:
        raise BadCorpus(
            f"the shipped corpus in {folder} cannot be read ({error}); reinstall farflock"
        ) from None
    digest, what = hashlib.sha256(text).hexdigest(), f"the shipped corpus in {folder}"
    _require_hash(digest, about.sha256, what, "reinstall farflock")
    return _cut_plays(text, about)


def from_file(path: Path) -> Corpus:
    """Return a user's UTF-8 text, with its last twentieth (by lines) held out; raise
    `BadCorpus`."""
    text = read_text(path)
    raw = text.encode()
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT_SHARE))) + 1
    train, held_out = text[:cut], text[cut:]
    if not train or len(held_out.encode()) < MIN_HELD_OUT_BYTES:
        raise BadCorpus(
            f"{path} has {len(raw)} bytes, too few to train on and to hold out "
            f"{MIN_HELD_OUT_BYTES} in whole lines; "
            f"use a text of at least {40 * MIN_HELD_OUT_BYTES} bytes"
        )
    titles = (f"the end of {path.name}",)
    return Corpus(path.name, train, held_out, titles, hashlib.sha256(raw).hexdigest())


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file; raise `BadCorpus` if it is none, or too long."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_TEXT_BYTES:
            raise BadCorpus(
                f"{path} has {size_bytes} bytes, above {MAX_TEXT_BYTES}; use a part of it"
            )
        return path.read_bytes().decode()
    except OSError as error:
        raise BadCorpus(
            f"the corpus {path} cannot be read ({error.strerror}); check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise BadCorpus(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None


def _require_hash(found: str, expected: str, what: str, remedy: str) -> None:
    if found != expected:
        raise BadCorpus(f"{what} has SHA-256 {found[:16]}…, expected {expected[:16]}…; {remedy}")


def _cut_plays(text: bytes, about: About) -> Corpus:
    """Put each play, whole, into the training text or the held-out text."""
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    start = 0
    for play in about.plays:
        texts[play.held_out].append(text[start : start + play.size_bytes])
        start += play.size_bytes
    if start != len(text):
        raise BadCorpus(
            f"the shipped plays are listed with {start} bytes, but the text has {len(text)}; "
            "reinstall farflock"
        )
    titles = tuple(play.title for play in about.plays if play.held_out)
    return Corpus(
        SHIPPED,
        b"".join(texts[False]).decode(),
        b"".join(texts[True]).decode(),
        titles,
        about.sha256,
    )
