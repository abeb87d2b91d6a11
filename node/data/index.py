"""The index of prepared data: which shards there are, and the hashes by which they are known.

A prepared folder:

    index.json               what is in it; its BLAKE3 hash is the root that names the data
    pages/HASH               up to 65,536 shards: for each its hash (32 bytes), its tokens and its
                             documents (little-endian, 32 bits each)
    tokens/PPP-SPLIT-NNNNN.bin    shards one after the other, up to 1 GiB in a file: those of
                             increment PPP, which one preparation wrote
    tokenizer.json           of Hugging Face's `tokenizers`; none for bytes
    seen/PPP                 the hashes of an increment's documents, for later additions

A shard has little-endian tokens of 16 or 32 bits, at most 4 MiB, and consists of whole documents,
each of which ends with the end of text. All chunks of the data hang from the root: whoever has it
can check the index, its pages, every shard and the tokenizer. Where in which file a shard lies
follows from the sizes of the shards before it.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES

VERSION = 1
INDEX_NAME, TOKENIZER_NAME = "index.json", "tokenizer.json"
MAX_SHARD_BYTES = MAX_CHUNK_BYTES
MAX_TOKEN_FILE_BYTES = 1 << 30
MAX_PAGE_SHARDS = 1 << 16
MAX_PAGES = 1 << 14  # of one increment: about 4 PiB of tokens
MAX_INCREMENTS = 1024
SPLITS = ("train", "held-out")
PATHS_NAME, PLACES_NAME = "in-place.json", "places"  # of shards in others' files (in_place.py)
PLACE = np.dtype([("file", "<u4"), ("offset", "<u8")])
ENTRY = np.dtype([("digest", "V32"), ("tokens", "<u4"), ("documents", "<u4")])

_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]  # 32 bytes, in hex
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


class BadIndex(ValueError):
    """An index, or a file that one lists, that is damaged or not what it should be; the message
    names the remedy."""


class ShardList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shards in order: how many, what they have together, and the pages that list them."""

    shards: _Count = 0
    tokens: _Count = 0
    documents: _Count = 0
    pages: Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_PAGES)] = ()

    def __post_init__(self) -> None:
        if len(self.pages) != -(-self.shards // MAX_PAGE_SHARDS):
            raise ValueError(f"{self.shards} shards in {len(self.pages)} pages")

    def on_page(self, place: int) -> int:
        """Return the number of shards on a page."""
        return min(MAX_PAGE_SHARDS, self.shards - place * MAX_PAGE_SHARDS)


class Increment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shards of one preparation: those to train on, and those that are held out."""

    train: ShardList
    held_out: ShardList

    def split(self, name: str) -> ShardList:
        """Return the shards of `train` or `held-out`."""
        return self.train if name == "train" else self.held_out


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer's file: its hash, its size, and the hashes of its chunks."""

    hash: _Hash
    bytes: _Count
    chunks: Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=64)]


class DataIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of index.json. Without a `tokenizer` tokens are bytes; `held_out` is the share of
    documents that is held out."""

    version: int = VERSION
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=2**32)]
    end_of_text: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    held_out: Annotated[float, msgspec.Meta(ge=0, le=0.5)]
    tokenizer: TokenizerFile | None = None
    increments: Annotated[
        tuple[Increment, ...], msgspec.Meta(min_length=1, max_length=MAX_INCREMENTS)
    ] = msgspec.field(name="parts")

    def __post_init__(self) -> None:
        if self.end_of_text >= self.vocabulary:
            raise ValueError(f"the end of text is {self.end_of_text} of {self.vocabulary} tokens")

    @property
    def token_type(self) -> "np.dtype[np.unsignedinteger]":
        """The type of a token in a shard."""
        return token_type(self.vocabulary)

    def totals(self, split: str) -> "Totals":
        """Return what all increments have together."""
        lists = [increment.split(split) for increment in self.increments]
        return Totals(*(sum(getattr(each, name) for each in lists) for name in Totals._fields))

    def encode(self) -> bytes:
        """Return the bytes of index.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Totals(NamedTuple):
    """Sums over shards."""

    shards: int
    tokens: int
    documents: int


def token_type(vocabulary: int) -> "np.dtype[np.unsignedinteger]":
    """Return the type of a token of this vocabulary in a shard."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def root_of(index: bytes) -> str:
    """Return the root of an index.json, in hex."""
    return digest_of(index).hex()


def read_index(raw: bytes, origin: str, root: str | None = None) -> DataIndex:
    """Return an index; raise `BadIndex` if it is not one, or not the one with this root."""
    if len(raw) > MAX_CHUNK_BYTES:
        raise BadIndex(
            f"{origin} has {len(raw):,} bytes, and an index at most {MAX_CHUNK_BYTES:,}; "
            "name a folder that `farflock data prepare` made"
        )
    if root is not None and root_of(raw) != root:
        raise BadIndex(
            f"{origin} has the root {root_of(raw)[:16]}…, and {root[:16]}… was asked for; "
            "name the folder of that data"
        )
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version == VERSION:
            return msgspec.json.decode(raw, type=DataIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadIndex(
            f"{origin} does not describe prepared data ({error}); make it with "
            "`farflock data prepare`"
        ) from None
    raise BadIndex(f"{origin} has version {version}, not {VERSION}; update farflock")


class _Versioned(msgspec.Struct):
    version: int


def read_page(
    raw: bytes, name: str, shards: int, kind: "np.dtype[np.unsignedinteger]"
) -> NDArray[np.void]:
    """Return the entries of a page (shards,), of type `ENTRY`; raise `BadIndex` if it is not the
    page of this name, or lists what no shard can be."""
    if len(raw) != shards * ENTRY.itemsize or digest_of(raw).hex() != name:
        raise BadIndex(f"the page {name[:16]}… is damaged; copy it again, or prepare it again")
    entries = np.frombuffer(raw, dtype=ENTRY)
    tokens, documents = entries["tokens"].astype(np.int64), entries["documents"]
    if (
        int(documents.min()) < 1
        or (documents > tokens).any()
        or int(tokens.max()) * kind.itemsize > MAX_SHARD_BYTES
    ):
        raise BadIndex(f"the page {name[:16]}… lists what no shard can be; prepare the data again")
    return entries


def read_entries(
    listed: ShardList, kind: "np.dtype[np.unsignedinteger]", page: Callable[[str], bytes]
) -> NDArray[np.void]:
    """Return the entries of a list (n,), of type `ENTRY`; `page` gives the bytes of a page. Raise
    `BadIndex` if they are not what the list says."""
    pages = [
        read_page(page(name), name, listed.on_page(place), kind)
        for place, name in enumerate(listed.pages)
    ]
    entries = np.concatenate([np.zeros(0, dtype=ENTRY), *pages])
    require_totals(entries, listed)
    return entries


def require_totals(entries: NDArray[np.void], listed: ShardList) -> None:
    """Raise `BadIndex` unless entries have together what their list says."""
    for name in ("tokens", "documents"):
        found = int(entries[name].sum(dtype=np.int64))
        if found != getattr(listed, name):
            raise BadIndex(
                f"the index says {getattr(listed, name):,} {name}, and its pages list {found:,}; "
                "prepare the data again"
            )
