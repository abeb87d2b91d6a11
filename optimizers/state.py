"""A method's state as plain tensors: its hash, which exact methods compare after each sync."""

import hashlib

import torch
from torch import Tensor

from farflock.optimizers.method import State


def state_hash(state: State) -> bytes:
    """SHA-256 over names, types, shapes and raw bytes, in sorted order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\x00{tensor.dtype}\x00{tuple(tensor.shape)}\x00".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.digest()


def named(prefix: str, tensors: dict[str, Tensor]) -> State:
    """The tensors copied under `prefix.name`."""
    return {f"{prefix}.{name}": tensor.clone() for name, tensor in tensors.items()}


def unnamed(prefix: str, state: State) -> dict[str, Tensor]:
    """The tensors that `named` put under this prefix, copied."""
    start = len(prefix) + 1
    return {name[start:]: tensor.clone() for name, tensor in state.items() if name.startswith(prefix + ".")}
