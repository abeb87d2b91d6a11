"""The weights of a Hugging Face folder: safetensors, in one file or in shards, read by tensor.

A folder may come from a stranger. Its heads are read first and checked against the model's shape
and the sizes of the files; values are then read in pieces, so that no tensor of the wrong size
takes memory. Nothing is unpickled.

What a run starts from is named by the hash of its weights, not by a file: see `WeightsFolder.hash`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.llama import Llama, ModelConfig, build
from farflock.node.model.stage_tensors import shapes_of

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CARD_NAME = "README.md"
CURVE_NAME = "evaluation.svg"  # a picture in the card
MAX_INDEX_BYTES = 16 * 1024 * 1024
MAX_WEIGHTS_HEAD_BYTES = 16 * 1024 * 1024
MAX_WEIGHTS_FILES = 1024
MAX_CARD_BYTES = 64 * 1024  # that are searched for a licence
PIECE_VALUES = 4 * 1024 * 1024  # read at once
LICENCE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"  # an identifier as the hub has them
UNSTATED = "unstated"  # the licence of a folder that names none
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HASH_DOMAIN = b"farflock-weights-v1"
_LENGTH_BYTES = 8
_SHOWN = 3  # tensors that an error names
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\.safetensors", re.ASCII)
_LICENCE = re.compile(LICENCE, re.ASCII)
_ANGLES = ".rotary_emb.inv_freq"  # older files keep them; they follow from the configuration
_REMEDY = "save the model again with transformers' save_pretrained"

_hashes: dict[tuple[Path, ModelConfig, tuple[object, ...]], str] = {}  # that were read here

_Side = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Side, ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor's values: `at` bytes into a file."""

    path: Path
    kind: torch.dtype
    shape: tuple[int, ...]
    at: int


class WeightsFolder:
    """The weights of a folder, which are exactly those of the model that `config` describes.

    Opening it reads heads only; raise `BadModelFolder` if a tensor is missing, unknown, of another
    shape or of a type that is not fp32, fp16 or bf16. A model with a head of its own takes it from
    the embedding if the file has none, as where the file's model is tied. A tied model ignores a
    head, as transformers does."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder, self.config = folder, config
        self._places = _named(_places(folder), config)
        found = {name: place.shape for name, place in self._places.items()}
        _require_shapes(folder, found, shapes_of(config, range(config.layers)))

    @property
    def hash(self) -> str:
        """The BLAKE3, in hex, of all tensors in order of their names: name, shape and the values
        as little-endian float32. It is the same however the weights are split into files, and
        whatever type they are stored in if that type holds them.

        This reads all of the folder, once for as long as no file changes. Raise `BadModelFolder`
        if a value is not finite: no peer would take such a state."""
        files = sorted({place.path for place in self._places.values()})
        stats = [(str(path), path.stat()) for path in files]
        seen = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
        key = self.folder, self.config, seen
        if key not in _hashes:
            _hashes[key] = self._digest()
        return _hashes[key]

    @property
    def stored_bytes(self) -> int:
        """The bytes that the values take in the files."""
        places = self._places.values()
        return sum(math.prod(place.shape) * place.kind.itemsize for place in places)

    def fill(self, name: str, weight: Tensor) -> None:
        """Read the tensor of this name into `weight`, of the same shape, on any device."""
        flat, at = weight.detach().view(-1), 0
        for piece in self._pieces(name):
            flat[at : at + len(piece)].copy_(piece)
            at += len(piece)

    def _digest(self) -> str:
        root = blake3(_HASH_DOMAIN)
        for name in sorted(self._places):
            root.update(f"{name}\x00{self._places[name].shape}\x00".encode())
            for piece in self._pieces(name):
                if not bool(torch.isfinite(piece).all()):
                    raise BadModelFolder(
                        f"{self._places[name].path}: {name} holds NaN or infinity; "
                        "take the weights of an earlier checkpoint"
                    )
                root.update(piece.view(torch.uint8).numpy().data)
        return root.hexdigest()

    def _pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's values in order, in float32."""
        place = self._places[name]
        left, size = math.prod(place.shape), place.kind.itemsize
        with place.path.open("rb") as stream:
            stream.seek(place.at)
            while left:
                raw = bytearray(min(left, PIECE_VALUES) * size)
                if stream.readinto(raw) != len(raw):
                    raise BadModelFolder(
                        f"{place.path} ends within {name}; copy the file again, whole"
                    )
                values = torch.frombuffer(raw, dtype=place.kind).float()
                left -= len(values)
                yield values


def initial(
    config: ModelConfig, seed: int, weights: WeightsFolder | None, span: range | None = None
) -> Llama:
    """Return a model, or a stage of it, with the weights that a run begins with: those of a folder
    or, without one, those that `build` draws from the seed."""
    if weights is None:
        return build(config, seed, span)
    model = Llama(config, span)
    for name, weight in model.named_parameters():
        weights.fill(name, weight)
    return model


def licence_in(folder: Path) -> str:
    """Return the licence that a folder's model card names in its head, or `UNSTATED`."""
    try:
        with (folder / CARD_NAME).open("rb") as stream:
            text = stream.read(MAX_CARD_BYTES).decode(errors="replace")
    except OSError:
        return UNSTATED
    first, *rest = text.splitlines() or [""]
    if first != "---" or "---" not in rest:
        return UNSTATED
    pairs = (line.partition(":") for line in rest[: rest.index("---")])
    fields = {key: value.strip().strip("\"'") for key, _, value in pairs}
    said = fields.get("license", "")
    said = fields.get("license_name", said) if said == "other" else said
    return said if _LICENCE.fullmatch(said) else UNSTATED


def _named(found: Mapping[str, _Place], config: ModelConfig) -> dict[str, _Place]:
    """Return the places of a folder's tensors by the names of the model's."""
    named = {name: place for name, place in found.items() if not name.endswith(_ANGLES)}
    if config.tied:
        named.pop(HEAD, None)
    elif EMBEDDING in named:
        named.setdefault(HEAD, named[EMBEDDING])
    return named


def _require_shapes(
    folder: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `BadModelFolder` for tensors that are missing, unknown, or of another shape; it names
    the first of them."""
    both = found.keys() & wanted.keys()
    wrong = {
        "are missing": sorted(wanted.keys() - found.keys()),
        "belong to no part of the model": sorted(found.keys() - wanted.keys()),
        "have another shape": sorted(name for name in both if found[name] != wanted[name]),
    }
    said = []
    for what, names in wrong.items():
        shown = [
            f"{name[:200]} ({found[name]} in place of {wanted[name]})"
            if name in both
            else name[:200]
            for name in names[:_SHOWN]
        ]
        if names:
            more = "" if len(names) <= _SHOWN else ", …"
            said.append(f"{len(names)} tensors {what} ({', '.join(shown)}{more})")
    if said:
        raise BadModelFolder(f"{folder} does not fit its config.json: {', '.join(said)}; {_REMEDY}")


def _places(folder: Path) -> dict[str, _Place]:
    """Return where each tensor of a folder is; an index is believed only as far as the files bear
    it out."""
    if not (folder / INDEX_NAME).exists():
        return _of_file(_existing(folder))
    index = _read_index(folder / INDEX_NAME)
    places: dict[str, _Place] = {}
    for shard in sorted(set(index.values())):
        here = _of_file(folder / shard)
        listed = {name for name, file in index.items() if file == shard}
        if here.keys() != listed:
            name = min(here.keys() ^ listed)
            raise BadModelFolder(
                f"{folder / shard} and {INDEX_NAME} disagree on {name[:200]!r}; {_REMEDY}"
            )
        places |= here
    return places


def _existing(folder: Path) -> Path:
    path = folder / SINGLE_NAME
    if path.exists():
        return path
    pickled = any(folder.glob("pytorch_model*.bin"))
    why = "it has pickled weights, which may run code" if pickled else "it has no weights"
    raise BadModelFolder(
        f"{folder}: {why}, and neither {SINGLE_NAME} nor {INDEX_NAME}; {_REMEDY}, which writes them"
    )


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, all in the index's own folder; raise `BadModelFolder` if the
    index cannot be read, or names other files."""
    with path.open("rb") as stream:
        raw = stream.read(MAX_INDEX_BYTES + 1)
    if len(raw) > MAX_INDEX_BYTES:
        raise BadModelFolder(f"{path} is larger than {MAX_INDEX_BYTES:,} bytes; {_REMEDY}")
    try:
        named = msgspec.json.decode(raw, type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFolder(f"{path} cannot be read: {error}; {_REMEDY}") from None
    files = set(named.values())
    if len(files) > MAX_WEIGHTS_FILES:
        raise BadModelFolder(
            f"{path} names {len(files):,} files, and at most {MAX_WEIGHTS_FILES:,} are read; "
            f"{_REMEDY}, in larger shards"
        )
    for file in sorted(files):
        if not _FILE_NAME.fullmatch(file):
            raise BadModelFolder(
                f"{path} names {file[:200]!r}, which is no safetensors file of its own folder; "
                f"{_REMEDY}"
            )
    return named


def _of_file(path: Path) -> dict[str, _Place]:
    """Return where each tensor of a safetensors file is; raise `BadModelFolder` unless its head
    describes its bytes exactly."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(0)
            head = _head(stream, size_bytes, path)
    except OSError as error:
        raise BadModelFolder(f"{path}: {error.strerror}; copy the whole folder again") from None
    try:
        described = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
        described.pop("__metadata__", None)
        tensors = {
            name: msgspec.json.decode(one, type=_Described) for name, one in described.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFolder(f"the head of {path} cannot be read: {error}; {_REMEDY}") from None
    return _laid_out(tensors, _LENGTH_BYTES + len(head), size_bytes, path)


def _head(stream: BinaryIO, size_bytes: int, path: Path) -> bytes:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if length > min(size_bytes - _LENGTH_BYTES, MAX_WEIGHTS_HEAD_BYTES):
        raise BadModelFolder(
            f"{path} claims a head of {length:,} bytes, and has {size_bytes:,} in all; "
            f"{_REMEDY}, or copy the file again"
        )
    return stream.read(length)


def _laid_out(
    tensors: Mapping[str, _Described], begin: int, size_bytes: int, path: Path
) -> dict[str, _Place]:
    """Return the places of tensors that follow one another from `begin` to the file's end."""
    places, at = {}, 0
    for name, one in sorted(tensors.items(), key=lambda entry: entry[1].data_offsets):
        kind = _TYPES.get(one.dtype)
        if kind is None:
            raise BadModelFolder(
                f"{path}: {name[:200]} is of type {one.dtype[:16]!r}, and weights are "
                f"{', '.join(_TYPES)}; save the model again in one of these types"
            )
        if one.data_offsets != (at, at + math.prod(one.shape) * kind.itemsize):
            raise BadModelFolder(
                f"{path} does not hold {name[:200]!r} where its head says; {_REMEDY}"
            )
        places[name] = _Place(path, kind, one.shape, begin + at)
        at = one.data_offsets[1]
    if begin + at != size_bytes:
        raise BadModelFolder(
            f"{path} has {size_bytes:,} bytes, and its head describes {begin + at:,}; "
            "copy the file again, whole"
        )
    return places
