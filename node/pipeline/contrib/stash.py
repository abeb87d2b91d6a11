"""Versions of a stage's weights by epoch: a backward pass runs at its forward pass's weights.

A stage that does not wait has moved on when a microbatch comes back. If the two passes saw
different weights, its gradient would not be that of any function; at the old version it is right
and merely late (optimizers/parts/corrections.py)."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from farflock.node.run.terms import MAX_VERSIONS

Weights = Mapping[str, Tensor]


class VersionGone(LookupError):
    """The requested version is gone or was never here; the message lists the versions that are
    here."""


class VersionAhead(LookupError):
    """The epoch that a request names has not begun here."""


class Stash:
    """The last `keep` versions that forward passes used. The newest is the module's own weights, or
    what `serve` put in their place, so `keep` - 1 copies are held, one for each epoch that ended.

    Law: between two calls the module's parameters are the newest weights. Only one thread at a time
    may use it."""

    def __init__(self, module: nn.Module, keep: int = 2, epoch: int = 0) -> None:
        if not 1 <= keep <= MAX_VERSIONS:
            raise ValueError(
                f"a stash of {keep} versions is out of range; "
                f"choose 1 (only the newest) to {MAX_VERSIONS}, usually 2"
            )
        self.epoch = epoch
        self._module, self._keep = module, keep
        self._old: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._served: dict[str, Tensor] | None = None
        self._lent = False

    @property
    def epochs(self) -> range:
        """Epochs of the versions held here, oldest first."""
        return range(self.epoch - len(self._old), self.epoch + 1)

    @property
    def size_bytes(self) -> int:
        """Bytes held in addition to the module's own weights."""
        versions = [*self._old.values(), *([self._served] if self._served is not None else [])]
        return sum(x.numel() * x.element_size() for version in versions for x in version.values())

    def delay(self, epoch: int) -> int:
        """Return a version's age in epochs; raise `VersionGone` or `VersionAhead` if not here."""
        if epoch > self.epoch:
            raise VersionAhead(
                f"epoch {epoch} has not begun here, where the epoch is {self.epoch}; "
                "ask a peer that is there, or ask later"
            )
        first = self.epochs.start
        if epoch < first:
            raise VersionGone(
                f"the weights of epoch {epoch} are gone, "
                f"those of {first} to {self.epoch} are here; drop the pass"
            )
        return self.epoch - epoch

    @contextmanager
    def version(self, epoch: int) -> Iterator[int]:
        """Compute and differentiate with that epoch's weights inside the block; yield their age in
        epochs. Raise `VersionGone` or `VersionAhead` if they are not here. Nothing is copied; the
        module must not be changed inside."""
        age = self.delay(epoch)
        weights = self._old[epoch] if age else self._served
        assert not self._lent, f"version {epoch} is requested inside the block of another one"
        self._lent = True
        try:
            with swapped(self._module, weights or {}):
                yield age
        finally:
            self._lent = False

    def serve(self, weights: Weights) -> None:
        """Use these predicted weights for this epoch's passes instead of the module's own; call it
        before the first of them. All parameters must be given. Their memory belongs to the stash
        from now on: it may write there."""
        missing = [name for name, _ in self._module.named_parameters() if name not in weights]
        if missing:
            raise ValueError(
                f"weights without {missing[0]} are not a version of this module; "
                "predict all of its parameters"
            )
        _require_fit(self._module, weights)
        self._served = dict(weights)

    def leave(self) -> None:
        """End the epoch; call this before the weights change. Copy the weights that its forward
        passes used, once, into the memory of the version that is dropped."""
        assert not self._lent, "an epoch ended inside the block of a version"
        if self._keep > 1:
            is_full = len(self._old) == self._keep - 1
            room = self._old.popitem(last=False)[1] if is_full else None
            served = self._served
            self._old[self.epoch] = _copied(self._module, room) if served is None else served
        self._served = None
        self.epoch += 1

    def begin_anew(self, epoch: int) -> None:
        """Forget all versions: the module has adopted weights of that epoch from elsewhere."""
        assert not self._lent, "weights were adopted inside the block of a version"
        self._old.clear()
        self._served, self.epoch = None, epoch


@contextmanager
def swapped(module: nn.Module, weights: Weights) -> Iterator[None]:
    """Replace the module's parameters of these names inside the block, without copies."""
    _require_fit(module, weights)
    places = {name: parameter for name, parameter in module.named_parameters() if name in weights}
    own = {name: parameter.data for name, parameter in places.items()}
    try:
        for name, parameter in places.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in places.items():
            parameter.data = own[name]


@torch.no_grad()
def _copied(module: nn.Module, room: dict[str, Tensor] | None) -> dict[str, Tensor]:
    if room is None:
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        room[name].copy_(parameter)
    return room


def _require_fit(module: nn.Module, weights: Weights) -> None:
    places = dict(module.named_parameters())
    for name, new in weights.items():
        if name not in places:
            raise ValueError(f"the module has no parameter {name} to put weights in")
        place = places[name]
        if (new.shape, new.dtype) != (place.shape, place.dtype):
            raise ValueError(
                f"{name} is {place.dtype} of shape {tuple(place.shape)}, "
                f"got {new.dtype} of shape {tuple(new.shape)}"
            )
