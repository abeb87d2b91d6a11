"""The index of prepared data: which shards there are, and the hashes by which they are known.

A prepared folder:

    index.json             the sources, their pages, and the tokenizer; its root names the data
    pages/SHA256.json      the shards of a source, up to `SHARDS_PER_PAGE` in a page
    shards/SHA256.bin      tokens, little-endian uint16 or uint32; each document ends with the end
                           of text, and the shard is all there is of it unless it was too long;
                           of conversations, the top bit of a token may be a mark
    tokenizer.json         of Hugging Face's `tokenizers`; none for bytes

The root is the BLAKE3 hash of index.json, and so the name of that chunk among peers. All else hangs
from it: each file is listed with its SHA-256, which names it on disks and servers, and with the
BLAKE3 hashes of its pieces, which name them among peers. Whoever has the root can check every byte.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec
import numpy as np

from farflock.node.tokens.marks import MAX_MARKED_VOCABULARY
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES

VERSION = 1
INDEX_NAME, TOKENIZER_NAME = "index.json", "tokenizer.json"
PIECE_BYTES = MAX_CHUNK_BYTES  # the unit in which files travel
SHARD_BYTES = 64 * 1024 * 1024  # about so many in a shard, if nothing else is said
MAX_SHARD_BYTES = 256 * 1024 * 1024
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
SHARDS_PER_PAGE = 512
MAX_PAGES = 8192  # of one source: 256 TiB of shards of the usual size
MAX_SOURCES = 64
MAX_HELD_OUT = 64  # shards of one source

_MAX_PIECES = MAX_SHARD_BYTES // PIECE_BYTES
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]  # 32 bytes, in hex
SourceName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
ListedT = TypeVar("ListedT", bound=msgspec.Struct)
# Called with the size of each piece that was read of a file; what it raises ends the reading.
AfterPiece = Callable[[int], None]


class BadIndex(ValueError):
    """An index, or a file that one lists, that is damaged or not what it should be; the message
    names the remedy."""


class ListedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the data: its SHA-256, its size in bytes, and the BLAKE3 hash of each piece."""

    sha256: Hash
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARD_BYTES)]
    pieces: Annotated[tuple[Hash, ...], msgspec.Meta(min_length=1, max_length=_MAX_PIECES)]

    def __post_init__(self) -> None:
        if len(self.pieces) != -(-self.size // PIECE_BYTES):
            raise ValueError(f"a file of {self.size} bytes with {len(self.pieces)} pieces")

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the digest and the size of each piece, in order."""
        for place, piece in enumerate(self.pieces):
            yield bytes.fromhex(piece), min(PIECE_BYTES, self.size - place * PIECE_BYTES)


class DataShard(ListedFile, frozen=True, kw_only=True):
    """A file of tokens, and how many documents end in it."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARD_BYTES)]
    documents: _Tokens

    @property
    def name(self) -> str:
        """The path in a prepared folder."""
        return f"shards/{self.sha256}.bin"


class DataPage(ListedFile, frozen=True, kw_only=True):
    """A file that lists shards, and what they have together."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_PER_PAGE)]
    tokens: _Tokens

    @property
    def name(self) -> str:
        """The path in a prepared folder."""
        return f"pages/{self.sha256}.json"


class PageContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a page."""

    shards: Annotated[tuple[DataShard, ...], msgspec.Meta(min_length=1, max_length=SHARDS_PER_PAGE)]


class DataSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source: the pages of what is trained on, and the shards that are held out."""

    documents: _Tokens
    tokens: _Tokens
    pages: Annotated[tuple[DataPage, ...], msgspec.Meta(min_length=1, max_length=MAX_PAGES)]
    held_out: Annotated[tuple[DataShard, ...], msgspec.Meta(max_length=MAX_HELD_OUT)] = ()


class TokenizerFile(ListedFile, frozen=True, kw_only=True):
    """The tokenizer's file."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENIZER_BYTES)]

    @property
    def name(self) -> str:
        """The path in a prepared folder."""
        return TOKENIZER_NAME


class DataIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of index.json. `vocabulary` bounds the tokens, of which each takes `token_bytes`;
    without a `tokenizer` they are bytes. With `answers` tokens may have a mark, and the loss leaves
    such ones out (node/tokens/marks.py); without, the member is not there."""

    version: int = VERSION
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=2**32)]
    token_bytes: Annotated[int, msgspec.Meta(ge=2, le=4)]
    end_of_text: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    tokenizer: TokenizerFile | None = None
    answers: bool | msgspec.UnsetType = msgspec.UNSET
    sources: Annotated[
        dict[SourceName, DataSource], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)
    ]

    def __post_init__(self) -> None:
        if self.answers is False:
            raise ValueError("answers is false, and is left out then")
        if self.answers and self.vocabulary > MAX_MARKED_VOCABULARY:
            raise ValueError(f"{self.vocabulary} tokens leave no bit for a mark")
        if self.token_bytes != token_bytes(self.vocabulary, self.counts_answers):
            raise ValueError(f"{self.vocabulary} tokens do not take {self.token_bytes} bytes each")
        if self.end_of_text >= self.vocabulary:
            raise ValueError(f"the end of text is {self.end_of_text} of {self.vocabulary} tokens")

    @property
    def counts_answers(self) -> bool:
        """True if the loss leaves out the tokens with a mark."""
        return self.answers is True

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger]":
        """The type of a token in a shard, its mark included."""
        return np.dtype(f"<u{self.token_bytes}")

    def encode(self) -> bytes:
        """Return the bytes of index.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def token_bytes(vocabulary: int, has_marks: bool = False) -> int:
    """Return how many bytes a token of this vocabulary takes in a shard."""
    return 2 if vocabulary <= 2**16 and not has_marks else 4


def root_of(index: bytes) -> str:
    """Return the root of an index.json, in hex."""
    return digest_of(index).hex()


def read_index(raw: bytes, origin: str, root: str | None = None) -> DataIndex:
    """Return an index; raise `BadIndex` if it is not one, or not the one with this root."""
    if len(raw) > PIECE_BYTES:
        raise BadIndex(f"{origin} has {len(raw):,} bytes, and an index at most {PIECE_BYTES:,}")
    if root is not None and root_of(raw) != root:
        raise BadIndex(
            f"{origin} has the root {root_of(raw)[:16]}…, and {root[:16]}… was asked for; "
            "name the folder of that data"
        )
    index = _decoded(raw, DataIndex, origin)
    if index.version != VERSION:
        raise BadIndex(f"{origin} has version {index.version}, not {VERSION}; update farflock")
    return index


def read_page(raw: bytes, page: DataPage, index: DataIndex) -> tuple[DataShard, ...]:
    """Return the shards of a page whose hash was checked; raise `BadIndex` for contradictions."""
    shards = _decoded(raw, PageContent, page.name).shards
    if len(shards) != page.shards or sum(shard.tokens for shard in shards) != page.tokens:
        raise BadIndex(f"{page.name} does not list what the index says; prepare the data again")
    require_sizes(shards, index)
    return shards


def require_sizes(shards: tuple[DataShard, ...], index: DataIndex) -> None:
    """Raise `BadIndex` unless each shard has as many bytes as its tokens take."""
    for shard in shards:
        if shard.size != shard.tokens * index.token_bytes:
            raise BadIndex(
                f"{shard.name} is listed with {shard.size} bytes and {shard.tokens} tokens of "
                f"{index.token_bytes} bytes; prepare the data again"
            )


def listed(path: Path) -> ListedFile:
    """Return the entry of a file on this machine."""
    with path.open("rb") as file:
        return listed_stream(file)


def listed_stream(file: BinaryIO, after: AfterPiece = lambda size: None) -> ListedFile:
    """Return the entry of what a stream has left, which is read piece by piece."""
    whole, pieces, size = hashlib.sha256(), list[str](), 0
    while piece := file.read(PIECE_BYTES):
        whole.update(piece)
        pieces.append(digest_of(piece).hex())
        size += len(piece)
        after(len(piece))
    return ListedFile(sha256=whole.hexdigest(), size=size, pieces=tuple(pieces))


def _decoded(raw: bytes, kind: type[ListedT], origin: str) -> ListedT:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadIndex(
            f"{origin} does not describe prepared data ({error}); make it with "
            "`farflock data prepare`"
        ) from None
