"""Keys and values that attention has computed, so that a further token costs one position.

A model writes into the cache that it is called with: `Llama.forward` reads `length` for the
positions of its tokens, and calls `advance` once they went through all layers.

Shapes: B sequences, J key-value heads, L new positions, P all positions so far, K width of a head.
"""

import torch
from torch import Tensor

ROOM = 64  # positions


class KeyValueCache:
    """The keys and values of every layer of a model, of at most `context` positions.

    Room for positions is taken as it is needed, twice as much each time, so that a short text with
    a model of a long context takes little memory."""

    def __init__(self, layers: int, context: int) -> None:
        self.length = 0
        self._context = context
        self._layers = [LayerCache(self) for _ in range(layers)]

    def __getitem__(self, layer: int) -> "LayerCache":
        """Return what a layer keeps, by its number in the whole model."""
        return self._layers[layer]

    def advance(self, count: int) -> None:
        """Count positions that every layer has appended."""
        self.length += count

    def room_for(self, count: int) -> int:
        """Return how many positions a layer takes memory for once it holds `count`."""
        return min(self._context, max(ROOM, 1 << (count - 1).bit_length()))


class LayerCache:
    """The keys and values of one layer, (B, J, P, K) each."""

    def __init__(self, owner: KeyValueCache) -> None:
        self._owner = owner
        self._kept: tuple[Tensor, Tensor] | None = None

    def extended(self, k_BJLK: Tensor, v_BJLK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new positions; return all of them (B, J, P, K)."""
        start = self._owner.length
        stop = start + k_BJLK.shape[2]
        if self._kept is None or self._kept[0].shape[2] < stop:
            self._kept = self._grown(k_BJLK, stop), self._grown(v_BJLK, stop, 1)
        for kept, new in zip(self._kept, (k_BJLK, v_BJLK), strict=True):
            kept[:, :, start:stop] = new
        keys, values = self._kept
        return keys[:, :, :stop], values[:, :, :stop]

    def _grown(self, like: Tensor, count: int, which: int = 0) -> Tensor:
        """Return a larger tensor that begins with what was kept of keys (0) or values (1)."""
        batch, heads, _, width = like.shape
        larger = like.new_empty(batch, heads, self._owner.room_for(count), width)
        if self._kept is not None:
            start = self._owner.length
            larger[:, :, :start] = self._kept[which][:, :, :start]
        return larger


def causal(new: int, total: int, place: torch.device) -> Tensor | None:
    """Return which of `total` positions each of the last `new` ones sees, bool (L, P); None if it
    sees them all."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=place).tril(total - new)
