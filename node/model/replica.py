"""A plain module as methods see it: float32 values out, new values in, one inner step at a time.

Methods must not know where a parameter or a moment is stored. `Slots` knows this, both for this
replica and for the sharded one (node/model/replica_fsdp.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflock.node.model.copied_ahead import CopiedAhead
from farflock.node.model.plain_names import plain_parameters
from farflock.optimizers.method import BlockChange, Replica, TensorBlock, Tensors, What
from farflock.optimizers.parts.blocks import as_real, block_length, blocks
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.muon import Muon
from farflock.optimizers.parts.packed_moment import PackedMoment
from farflock.optimizers.parts.portable_inner import clip_norm_, is_portable
from farflock.optimizers.parts.small_adamw import SmallAdamW

Storage = Callable[[Sequence[int]], Tensor]  # a shape -> float32 zeros
SCALARS = ("step", "mu_product")  # moments of one number per parameter


class Slots:
    """The tensors of a module and its inner optimizer, by the names that methods use.

    Names are those without wrappers. A tied parameter appears once; buffers and frozen parameters
    do not appear. A complex tensor is seen as a real one, whose last dimension holds the two parts.
    """

    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, clip_norm: float | None
    ) -> None:
        self.parameters = {
            name: entry for name, entry in plain_parameters(module).items() if entry.requires_grad
        }
        self._inner, self._clip_norm = inner, clip_norm
        # by name, in the module's order
        self.shapes = {
            name: tuple(as_real(one.detach()).shape) for name, one in self.parameters.items()
        }

    def find(self, name: str, what: What) -> Tensor:
        """Return the stored tensor; a missing one reads as zeros, and NAdam's product as 1."""
        parameter, stored = self.parameters[name], self._stored(name, what)
        if stored is not None:
            return stored
        if what not in SCALARS:
            return as_real(torch.zeros_like(parameter.detach()))
        begins_at_1 = what == "mu_product" and isinstance(self._inner, torch.optim.NAdam)
        return torch.full((), float(begins_at_1), dtype=torch.float32)

    def peek(self, name: str, what: What) -> Tensor:
        """Return `find` to be read only: zeros that are missing take no memory."""
        if what in SCALARS or self._stored(name, what) is not None:
            return self.find(name, what)
        return torch.zeros((), dtype=torch.float32).expand(self.shapes[name])

    def _stored(self, name: str, what: What) -> Tensor | None:
        parameter = self.parameters[name]
        if what == "param":
            return as_real(parameter.detach())
        moments = self._inner.state.get(parameter, {})
        stored = parameter.grad if what == "grad" else moments.get(what)
        if isinstance(stored, PackedMoment):
            return stored.whole()
        return None if stored is None else as_real(torch.as_tensor(stored).detach())

    def packed(self, name: str, what: What) -> PackedMoment | None:
        """Return a moment that is kept in one byte a value; what else reads it gets a copy."""
        moment = self._inner.state.get(self.parameters[name], {}).get(what)
        return moment if isinstance(moment, PackedMoment) else None

    def piece(self, name: str, what: What, start: int, stop: int) -> Tensor:
        """Return flat values of `peek`."""
        packed = self.packed(name, what)
        if packed is not None:
            return packed.read(start, stop)
        return flat_range(self.peek(name, what), start, stop)

    def ensure(self, name: str, what: What) -> Tensor | None:
        """Return the tensor to write to, created if it is missing; None for a moment that the
        optimizer does not have."""
        parameter = self.parameters[name]
        if what == "param":
            return as_real(parameter.detach())
        if what == "grad":
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return as_real(parameter.grad)
        state = self._inner.state[parameter]
        if state.get(what) is None:
            first: dict[str, Tensor | PackedMoment] = {**self._first_moments(parameter)}
            if what == TREND:
                first[TREND] = torch.zeros_like(parameter)
            state.update({name: zero for name, zero in first.items() if state.get(name) is None})
        stored: Tensor | PackedMoment | None = state.get(what)
        if stored is None:
            return None
        return stored.whole() if isinstance(stored, PackedMoment) else as_real(stored)

    def drop_gradient(self, name: str) -> None:
        """Leave a parameter without a gradient, as if nothing had reached it: it reads as zeros,
        and the inner step leaves the parameter as it is."""
        self.parameters[name].grad = None

    def drop_spoiled(self) -> None:
        """Forget the moments of each parameter that has one which is not finite, and all gradients
        that are not."""
        for name, parameter in self.parameters.items():
            kept = (what for what, x in self._inner.state.get(parameter, {}).items() if is_kept(x))
            if not all(_is_finite(self.find(name, what)) for what in kept):
                self._inner.state.pop(parameter)
            if parameter.grad is not None and not _is_finite(parameter.grad):
                self.drop_gradient(name)

    def step(self, rate: float | None) -> None:
        """Clip the gradient norm, step at `rate` (None: unchanged), and zero the gradients."""
        for group in self._inner.param_groups if rate is not None else ():
            group["lr"] = rate
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._inner.step()
        self._inner.zero_grad()  # their memory is free for the exchange that may follow

    def _clip(self, max_norm: float) -> None:
        parameters = self.parameters.values()
        if is_portable(self._inner) and not any(hasattr(x, "to_local") for x in parameters):
            clip_norm_(parameters, max_norm)
        else:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def _first_moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor | PackedMoment]:
        """Return all moments that the optimizer starts with, as it would not create one that is
        missing."""
        inner = (
            self._inner.optimizer_of(parameter) if isinstance(self._inner, Muon) else self._inner
        )
        options = inner.defaults
        if isinstance(inner, SmallAdamW):
            return inner.first_state(parameter)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam):
            on_device = options.get("fused") or options.get("capturable")
            step = torch.zeros(
                (), device=parameter.device if on_device else "cpu", dtype=torch.float32
            )
            first: dict[str, Tensor | PackedMoment] = {
                "step": step,
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            if isinstance(inner, torch.optim.NAdam):
                first["mu_product"] = torch.ones_like(step)
            return first
        # torch before 2.9 has no Muon
        with_momentum = (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))
        if isinstance(inner, with_momentum) and options["momentum"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return {}


class PlainReplica:
    """One process, one module, one inner optimizer. The loop sets `lr` before each step, and
    whoever made the replica may set where a method's state is kept: methods compute there."""

    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, clip_norm: float | None = 1.0
    ) -> None:
        self._slots = Slots(module, inner, clip_norm)
        self.lr: float | None = None
        self.storage = in_memory

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the module's order."""
        return tuple(self._slots.parameters)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        return self._slots.shapes

    @property
    def storage(self) -> Storage:
        """Where a method's state is kept."""
        return self._storage

    @storage.setter
    def storage(self, storage: Storage) -> None:
        self._storage = storage
        self.home = storage((0,)).device  # of the state, and of all that methods read

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return float32 copies at home; gradients and moments that do not exist are zeros."""
        return {
            name: self._slots.peek(name, what).to(
                self.home, torch.float32, copy=True, memory_format=torch.contiguous_format
            )
            for name in names
        }

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Set x <- (1 - mix)·x + mix·new; raise `ValueError` for another shape or an unknown
        moment."""
        for name, new in tensors.items():
            target = self._slots.ensure(name, what)
            require_place(name, what, target, new)
            if target is not None:
                blend(target, new.to(target.device, target.dtype), mix)
                self._repack(name, what, target)

    def block(self, name: str, what: What, start: int, stop: int) -> Tensor:
        """Return float32 values at home: the stored ones themselves if they are that."""
        return float_block(self._slots.piece(name, what, start, stop), self.home)

    def update(self, names: Sequence[str], whats: Sequence[What], change: BlockChange) -> None:
        """Change the stored tensors block by block."""
        written = set[int]()

        def noting(block: TensorBlock, *values: Tensor) -> Sequence[Tensor | None]:
            new = change(block, *values)
            written.update(place for place, x in enumerate(new) if x is not None)
            return new

        for name in names:
            stored = [self._slots.find(name, what) for what in whats]
            flat = [x.reshape(-1) for x in stored]  # a copy if it is not contiguous
            if self.home.type == "cpu" and not flat[0].is_cpu:
                CopiedAhead(flat).change(list(blocks(name, stored[0].shape)), noting)
            else:
                self._change(list(blocks(name, stored[0].shape, self._length)), flat, noting)
            for place in sorted(written):
                x = stored[place]
                if not x.is_contiguous():
                    in_memory_order(x).copy_(flat[place].view_as(x).permute(memory_order(x)))
            for what, x in zip(whats, stored, strict=True):
                self._repack(name, what, x)

    def _repack(self, name: str, what: What, changed: Tensor) -> None:
        """Store a changed copy of a moment that is kept in one byte a value."""
        packed = self._slots.packed(name, what)
        if packed is not None:
            packed.write(0, changed.reshape(-1))

    def _change(
        self, todo: Sequence[TensorBlock], flat: Sequence[Tensor], change: BlockChange
    ) -> None:
        for block in todo:
            places = [block.of(x) for x in flat]
            new = change(block, *(float_block(x, self.home) for x in places))
            for place, values in zip(places, new, strict=True):
                if values is not None:
                    place.copy_(values)

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return zeros in `storage`."""
        return self.storage(shape)

    def inner_step(self, lr: float | None = None) -> None:
        """Clip the gradient norm, step at `lr` (None: at `self.lr`), and zero the gradients."""
        self._slots.step(self.lr if lr is None else lr)

    def drop_gradients(self, names: Sequence[str]) -> None:
        """Leave these parameters without gradients, which then read as zeros."""
        for name in names:
            self._slots.drop_gradient(name)

    def drop_spoiled(self) -> None:
        """See the function of this name."""
        self._slots.drop_spoiled()

    @property
    def _length(self) -> int:
        return block_length(torch.empty(0, dtype=torch.float32, device=self.home))


def drop_spoiled(replica: Replica) -> None:
    """Forget moments of the inner optimizer that are not finite, after a batch that gave NaN: they
    begin again. Shards keep theirs."""
    if isinstance(replica, PlainReplica):
        replica.drop_spoiled()


def in_memory(shape: Sequence[int]) -> Tensor:
    """Return float32 zeros in memory, whatever a program's default device is."""
    return torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Memory of a device for tensors."""

    place: torch.device

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return float32 zeros there."""
        return torch.zeros(tuple(shape), dtype=torch.float32, device=self.place)


def float_block(stored: Tensor, home: torch.device) -> Tensor:
    """Return values in float32 at home, without a copy if they are that already."""
    return stored.to(home, torch.float32)


def require_place(name: str, what: What, target: Tensor | None, new: Tensor) -> None:
    """Raise `ValueError` unless `new` has the target's shape; with no target it must be zeros."""
    if target is None:
        if bool(new.any()):
            raise ValueError(
                f"the inner optimizer keeps no {what} for {name}; "
                "use the optimizer that the state is from"
            )
    elif new.shape != target.shape:
        raise ValueError(
            f"{what} of {name} has shape {tuple(target.shape)}, got {tuple(new.shape)}"
        )


def blend(target: Tensor, new: Tensor, mix: float) -> None:
    """Set x <- (1 - mix)·x + mix·new in place, each operation rounded (portable arithmetic)."""
    target.copy_(new if mix == 1.0 else target * (1 - mix) + new * mix)


def flat_range(x: Tensor, start: int, stop: int) -> Tensor:
    """Return the values [start, stop) of `x.reshape(-1)`, of which little more is copied if the
    tensor is transposed or channels-last."""
    while not x.is_contiguous() and x.dim() > 1:
        width = x[0].numel()
        first, last = start // width, -(-stop // width)
        start, stop = start - first * width, stop - first * width
        if last - first != 1:
            x = x[first:last]
            break
        x = x[first]
    if not x.is_contiguous():
        # lines of memory are copied first, as torch would go through them once for each row of few
        order = memory_order(x)
        x = in_memory_order(x).contiguous().permute([order.index(dim) for dim in range(x.dim())])
    return x.reshape(-1)[start:stop]


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of a tensor, those first whose values are farthest apart."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def in_memory_order(x: Tensor) -> Tensor:
    """Return a view with the dimensions in that order."""
    return x.permute(memory_order(x))


def is_kept(x: object) -> bool:
    """Return whether an entry of an optimizer's state is a moment."""
    return isinstance(x, Tensor | PackedMoment)


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
