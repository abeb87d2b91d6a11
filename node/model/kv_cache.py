"""Keys and values that attention has computed, so that a further token costs one position.

`Llama.next_logits` reads and extends the cache that it is called with.

Shapes: B sequences, J key-value heads, L new positions, P all positions so far, K width of a head.
"""

import torch
from torch import Tensor

ROOM = 64  # positions that the first call takes memory for


class KeyValueCache:
    """The keys and values of every layer of a model, for at most `context` positions."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        """The number of positions so far."""
        return self.layers[0].length


class LayerCache:
    """The keys and values of one layer, (B, J, P, K) each.

    Room is taken as it is needed, twice as much each time, so that a short text takes little memory
    in a model of a long context."""

    def __init__(self, context: int) -> None:
        self.length = 0
        self._context = context
        self._kept: tuple[Tensor, Tensor] | None = None

    def extended(self, k_BJLK: Tensor, v_BJLK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new positions; return all of them (B, J, P, K)."""
        start, stop = self.length, self.length + k_BJLK.shape[2]
        if self._kept is None or self._kept[0].shape[2] < stop:
            self._kept = self._grown(0, k_BJLK, stop), self._grown(1, v_BJLK, stop)
        keys, values = self._kept
        keys[:, :, start:stop] = k_BJLK
        values[:, :, start:stop] = v_BJLK
        self.length = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def _grown(self, which: int, like: Tensor, count: int) -> Tensor:
        """Return a larger tensor that begins with what was kept of keys (0) or values (1)."""
        batch, heads, _, width = like.shape
        larger = like.new_empty(batch, heads, room(count, self._context), width)
        if self._kept is not None:
            larger[:, :, : self.length] = self._kept[which][:, :, : self.length]
        return larger


def room(count: int, context: int) -> int:
    """Return the number of positions to take memory for once there are `count`: the next power of
    two, at least `ROOM`, and no more than the context."""
    return min(context, max(ROOM, 1 << (count - 1).bit_length()))


def causal(new: int, total: int, place: torch.device) -> Tensor:
    """Return which of `total` positions each of the last `new` ones sees, bool (L, P)."""
    return torch.ones(new, total, dtype=torch.bool, device=place).tril(total - new)
