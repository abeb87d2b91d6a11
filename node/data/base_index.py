"""The index of a base: the files of a model that stays as it is while adapters are trained.

A run of adapters needs its base on every machine. The manifest names the weights by their hash
(node/state/weights_file.py), and the founder's folder of them by the root of this index: a peer
that has the root can fetch the files from anybody, and check every byte.

The index is one chunk. It is never written into the founder's folder, which may belong to others.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from farflock.node.data.index import (
    MAX_TOKENIZER_BYTES,
    PIECE_BYTES,
    TOKENIZER_NAME,
    AfterPiece,
    BadIndex,
    Hash,
    ListedFile,
    listed_stream,
    root_of,
)
from farflock.node.model.hf_config import CONFIG_NAME, MAX_CONFIG_BYTES, BadModelFolder
from farflock.node.state.weights_file import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    MAX_WEIGHTS_FILES,
    SINGLE_NAME,
    read_weights_index,
)

BASE_VERSION = 1
MAX_BASE_FILE_BYTES = 2**40
# The files beside the weights, and the most bytes of each. A base has those that are there.
_BESIDE = {
    CONFIG_NAME: MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    INDEX_NAME: MAX_INDEX_BYTES,
    TOKENIZER_NAME: MAX_TOKENIZER_BYTES,
    "tokenizer_config.json": MAX_TOKENIZER_BYTES,
    "special_tokens_map.json": MAX_TOKENIZER_BYTES,
    "chat_template.jinja": MAX_TOKENIZER_BYTES,
}
# 200 characters at most: a download makes the name longer for a while.
_WEIGHTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,187}\.safetensors", re.ASCII)
_PIECE_CHARS = 67  # of a piece in the index: its hash, two quotes and a comma
_KEPT_INDEXES = 4

BytesProgress = Callable[[int, int], None]  # (bytes done, bytes in all)
_Seen = tuple[tuple[str, int, int, int], ...]  # files: path, size, time of change, inode
_made: dict[_Seen, bytes] = {}  # indexes that this process made


class BaseFile(ListedFile, frozen=True, kw_only=True):
    """A file of a base, of one of the few names that such files have."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BASE_FILE_BYTES)]
    pieces: Annotated[
        tuple[Hash, ...],
        msgspec.Meta(min_length=1, max_length=MAX_BASE_FILE_BYTES // PIECE_BYTES),
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > _max_bytes(self.name):
            raise ValueError(f"a file {self.name[:200]!r} of {self.size} bytes")


class BaseIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a base's index: its files, in the order of their names."""

    version: int = BASE_VERSION
    files: Annotated[
        tuple[BaseFile, ...],
        msgspec.Meta(min_length=2, max_length=MAX_WEIGHTS_FILES + len(_BESIDE)),
    ]

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        # Some file systems do not tell upper case from lower case.
        if names != sorted(names) or len({name.lower() for name in names}) < len(names):
            raise ValueError("files out of order, or two of one name")
        weights = [name for name in names if name not in _BESIDE]
        if CONFIG_NAME not in names or not weights:
            raise ValueError(f"no {CONFIG_NAME}, or no weights")
        if INDEX_NAME not in names and weights != [SINGLE_NAME]:
            raise ValueError(f"neither {INDEX_NAME} nor {SINGLE_NAME} alone")

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def beside(self) -> tuple[BaseFile, ...]:
        """The files other than the weights."""
        return tuple(file for file in self.files if file.name in _BESIDE)

    def encode(self) -> bytes:
        """Return the bytes of the index."""
        return msgspec.json.encode(self)


def index_of(folder: Path, progress: BytesProgress = lambda done, total: None) -> bytes:
    """Return the index of a folder in Hugging Face's form.

    This reads all of its files, once for as long as none of them changes; what `progress` raises
    ends that. Raise `BadModelFolder` if a file is missing, empty or too large, or if all of them
    are too many bytes for one index."""
    names = _names_in(folder)
    seen = tuple(_stat_of(folder / name, _max_bytes(name)) for name in names)
    if seen in _made:
        return _made[seen]
    total, done = sum(size for _, size, _, _ in seen), 0
    _require_one_chunk(folder, -(-total // PIECE_BYTES) * _PIECE_CHARS)

    def after(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    index = BaseIndex(files=tuple(_entry(folder, name, after) for name in names)).encode()
    _require_one_chunk(folder, len(index))
    _made[seen] = index
    while len(_made) > _KEPT_INDEXES:
        del _made[next(iter(_made))]
    return index


def read_base_index(raw: bytes, origin: str, root: str | None = None) -> BaseIndex:
    """Return the index of a base; raise `BadIndex` if it is not one, or not that of this root."""
    if len(raw) > PIECE_BYTES:
        raise BadIndex(f"{origin} has {len(raw):,} bytes, and an index at most {PIECE_BYTES:,}")
    if root is not None and root_of(raw) != root:
        raise BadIndex(
            f"{origin} has the root {root_of(raw)[:16]}…, and {root[:16]}… was asked for; "
            "name a folder of that model with --base"
        )
    try:
        index = msgspec.json.decode(raw, type=BaseIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadIndex(
            f"{origin} does not describe the files of a model ({error}); "
            "name a folder of that model with --base"
        ) from None
    if index.version != BASE_VERSION:
        raise BadIndex(f"{origin} has version {index.version}, not {BASE_VERSION}; update farflock")
    return index


def _max_bytes(name: str) -> int:
    """Return the largest size of a file of this name; -1 if a base has no such file."""
    return _BESIDE.get(name, MAX_BASE_FILE_BYTES if _WEIGHTS.fullmatch(name) else -1)


def _names_in(folder: Path) -> list[str]:
    """Return the names of a folder's files that belong to the base, in order."""
    beside = [name for name in _BESIDE if name == CONFIG_NAME or (folder / name).exists()]
    weights = _shards_in(folder / INDEX_NAME) if INDEX_NAME in beside else [SINGLE_NAME]
    return sorted([*beside, *weights])


def _shards_in(path: Path) -> list[str]:
    """Return the files that an index of weights names."""
    try:
        names = set(read_weights_index(path).values())
    except OSError as error:
        raise BadModelFolder(f"{path}: {error.strerror}; copy the whole folder again") from None
    for name in sorted(names):
        if not _WEIGHTS.fullmatch(name):
            raise BadModelFolder(
                f"{path} names {name[:200]!r}, and files of weights are called as in"
                " model-00001-of-00002.safetensors; save the model again with transformers'"
                " save_pretrained"
            )
    return sorted(names)


def _stat_of(path: Path, max_bytes: int) -> tuple[str, int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise BadModelFolder(f"{path}: {error.strerror}; copy the whole folder again") from None
    if not path.is_file() or not 0 < stat.st_size <= max_bytes:
        raise BadModelFolder(
            f"{path} is no file of 1 to {max_bytes:,} bytes; copy the whole folder again, or take"
            " this file away if the model does not need it"
        )
    return str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _entry(folder: Path, name: str, after: AfterPiece) -> BaseFile:
    try:
        with (folder / name).open("rb") as stream:
            return BaseFile(name=name, **msgspec.structs.asdict(listed_stream(stream, after)))
    except OSError as error:
        raise BadModelFolder(
            f"{folder / name}: {error.strerror}; copy the whole folder again"
        ) from None


def _require_one_chunk(folder: Path, size: int) -> None:
    if size > PIECE_BYTES:
        most = PIECE_BYTES // _PIECE_CHARS * PIECE_BYTES
        raise BadModelFolder(
            f"the files in {folder} have too many bytes to travel between peers, which is about"
            f" {most / 1e9:.0f} GB; save the model in bf16, or choose a smaller one"
        )
