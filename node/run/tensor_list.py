"""Lists of the tensors of users' own models: members send theirs to a joiner whose model is another
one, so that its refusal names what differs.

The founder's signed head has the hash of the list. It comes from other peers: its size, its counts
and the types in it are checked before anything is made of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from farflock.node.model.plain_names import plain_parameters
from farflock.node.run.head import MAX_LIST_BYTES

MAX_SHOWN = 120  # characters of a name that another peer sends
BASE = "load the same base, or let all peers say frozen='any'"
BUILD = "build the model as the run's founder did"

ListedSize = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
ListedText = Annotated[str, msgspec.Meta(max_length=4096)]


class ListedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A parameter; `values` is the SHA-256 of a frozen one's, and empty if it is trained."""

    name: ListedText
    shape: Annotated[tuple[ListedSize, ...], msgspec.Meta(max_length=64)]
    dtype: ListedText
    values: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


TensorList = tuple[ListedTensor, ...]


def list_tensors(
    model: nn.Module, *, with_frozen: bool = True, buffers: Mapping[str, Tensor] | None = None
) -> TensorList:
    """Return all parameters in the model's order, or only the trained ones; and these buffers."""
    parameters = (
        ListedTensor(
            name,
            tuple(entry.shape),
            str(entry.dtype),
            b"" if entry.requires_grad else _hash(entry),
        )
        for name, entry in plain_parameters(model).items()
        if with_frozen or entry.requires_grad
    )
    others = (
        ListedTensor(f"{name} (a buffer)", tuple(x.shape), str(x.dtype))
        for name, x in (buffers or {}).items()
    )
    return (*parameters, *others)


def encode(tensors: TensorList) -> bytes:
    """Return the list as it is hashed and sent; empty if it is too large for that."""
    raw = msgspec.msgpack.encode(tensors)
    return raw if len(raw) <= MAX_LIST_BYTES else b""


def decode(raw: bytes) -> TensorList | None:
    """Return the list that a member sent, or None if it is not one."""
    if len(raw) > MAX_LIST_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=TensorList)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def first_difference(here: Sequence[ListedTensor], run: Sequence[ListedTensor]) -> tuple[str, ...]:
    """Return what differs first, and what to do about it; empty if nothing does."""
    ours, theirs = ({each.name: each for each in tensors} for tensors in (here, run))
    for name, expected in theirs.items():
        if name not in ours:
            return f"{_shown(name)} is missing here", BUILD
        if said := _differs(ours[name], expected):
            return f"{_shown(name)} {said[0]}", said[1]
    for name, other in zip(ours, theirs, strict=False):
        if name in theirs and name != other:
            return f"{_shown(name)} is here in the place of {_shown(other)}", BUILD
    extra = next((name for name in ours if name not in theirs), None)
    return () if extra is None else (f"{_shown(extra)} is not in the run's model", BUILD)


def _differs(here: ListedTensor, run: ListedTensor) -> tuple[str, ...]:
    if here.shape != run.shape:
        return f"has the shape {here.shape} here and {run.shape} in the run", BUILD
    if here.dtype != run.dtype:
        return f"is {here.dtype} here and {_short(run.dtype)} in the run", BUILD
    if bool(here.values) != bool(run.values):
        words = {True: "frozen", False: "trained"}
        why = f"is {words[bool(here.values)]} here and {words[bool(run.values)]} in the run"
        return why, BUILD
    if here.values != run.values:
        return "is frozen, and its values here are not the run's", BASE
    return ()


def _shown(name: str) -> str:
    return f"parameter {_short(name)}"


def _short(text: str) -> str:
    """Return a text of another peer as it may be shown."""
    return "".join(x if x.isprintable() else "?" for x in text[:MAX_SHOWN])


def _hash(entry: Tensor) -> bytes:
    """Return the hash of a frozen tensor's bytes; of a shard, all ranks take part."""
    gathered = getattr(entry, "full_tensor", None)
    whole = entry if gathered is None else gathered()
    values = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(values.data).digest()
