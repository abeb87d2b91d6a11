"""Text to train on and text held out: the plays of Shakespeare, which come with Farflock.

A user's own texts become prepared data (node/data/index.py). Every peer of a run must have the same
text. Its hash is checked on loading. The corpus itself fixes which plays are held out; they are
never drawn at random.
"""

import hashlib
import lzma
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

SHIPPED = "shakespeare"


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
    """Return the corpus `shakespeare`; raise `BadCorpus` for any other.

    `sha256` is the manifest's hash of the whole text: any other text is refused.
    """
    if name != SHIPPED:
        raise BadCorpus(
            f"{name!r:.80} does not come with Farflock, only {SHIPPED!r} does; prepare a text of"
            " your own with `farflock data prepare`, and name that folder as data.from"
        )
    corpus = shakespeare(files("farflock.node") / "texts")
    if sha256 is not None:
        _require_hash(corpus.sha256, sha256, f"the corpus {name}", "use the founder's version")
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


def _require_hash(found: str, expected: str, what: str, remedy: str) -> None:
    if found != expected:
        raise BadCorpus(f"{what} has SHA-256 {found[:16]}…, expected {expected[:16]}…; {remedy}")


def _cut_plays(text: bytes, about: About) -> Corpus:
    """Put each play, whole, into the training text or the held-out text."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    start = 0
    for play in about.plays:
        parts[play.held_out].append(text[start : start + play.size_bytes])
        start += play.size_bytes
    if start != len(text):
        raise BadCorpus(
            f"the shipped plays are listed with {start} bytes, but the text has {len(text)}; "
            "reinstall farflock"
        )
    titles = tuple(play.title for play in about.plays if play.held_out)
    return Corpus(
        SHIPPED,
        b"".join(parts[False]).decode(),
        b"".join(parts[True]).decode(),
        titles,
        about.sha256,
    )
