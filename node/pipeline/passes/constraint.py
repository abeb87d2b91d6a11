"""The constraint that a subspace codec puts on weights.

All weights that write into the residual stream before the last edge write into the subspace, after
every step, average, download and recovery.

In Farflock's model (node/model/llama.py) these are the embedding, and `o_proj` and `down_proj` of
each layer. The norms' gains stretch single coordinates and would lead out of the subspace, but they
act on what a branch reads, not on what it adds. The last stage is exempt: nothing that it computes
goes over an edge.

The embedding stays one table, as in every Llama: E = E_fix + E_S, with E_S in the subspace, so that
projecting it is E <- E_fix + (E - E_fix) P. Exports, checkpoints and averages see ordinary weights.

The seam consists of functions that the core needs anyway: `Stage.of_weights` returns gradients, and
a replica's `write` and `inner_step` change weights. Only the assembly chooses between the
constrained and the plain versions.

Shapes: D model width, K rank, V vocabulary."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from farflock.compression.subspace import Basis, project
from farflock.node.model.device import Device
from farflock.node.model.llama import Llama
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.passes.stage import Gradients, Stage
from farflock.optimizers.method import BlockChange, Tensors, What

EMBEDDING = "model.embed_tokens.weight"
_WRITER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.o_proj|mlp\.down_proj)\.weight")
# The residual stream's dimension in a linear layer's weight, and in an embedding.
_OUTPUT, _ROW = 0, 1


def writers(names: Iterable[str], tail: int) -> dict[str, int]:
    """Return the tensors that write to the stream before layer `tail`, each with the dimension
    that is the stream's."""
    found = {
        name: _OUTPUT
        for name in names
        if (match := _WRITER.fullmatch(name)) and int(match[1]) < tail
    }
    return {EMBEDDING: _ROW, **found} if tail and EMBEDDING in set(names) else found


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """The subspace to which some tensors are constrained. `dims` are as in `writers`; if empty,
    nothing is constrained. The basis is on the tensors' device."""

    basis: Basis
    dims: Mapping[str, int]

    @classmethod
    def on(cls, names: Iterable[str], stages: Sequence[range], basis: Basis) -> "Constraint":
        """Return the constraint on a stage, or on a whole model averaged with such stages."""
        return cls(basis, writers(list(names), stages[-1].start))

    def begin(self, model: nn.Module) -> None:
        """Constrain initial weights: the embedding is frozen (E_S = 0), the rest is projected."""
        tensors = dict(model.named_parameters())
        if EMBEDDING in self.dims:
            with torch.no_grad():
                tensors[EMBEDDING].copy_(self.basis.fixed_VD)
        self.keep(tensors)

    def keep(self, tensors: Tensors) -> None:
        """Project the constrained tensors in place, with the same bits on every machine.

        Tensors that are already in the subspace do not change."""
        dims = {name: dim for name, dim in self.dims.items() if name in tensors}
        project(tensors, dims, self.basis, {EMBEDDING: self.basis.fixed_VD})

    def of_gradients(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the same loss with respect to weights that are projected first.

        A stage receives only the part of a gradient inside the subspace. So these gradients, unlike
        those of free weights, do not depend on where the model is cut."""
        return {name: self._inside(name, x) for name, x in gradients.items()}

    def _inside(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self.dims:
            return gradient
        columns_DK = self.basis.columns(gradient.dtype).to(gradient.dtype)
        last = gradient.movedim(self.dims[name], -1)
        return ((last @ columns_DK) @ columns_DK.T).movedim(-1, self.dims[name])

    def after(self, basis: Basis) -> "Constraint":
        """Return the same constraint with another version of the basis."""
        return replace(self, basis=basis.on(self.basis.columns_DK.device))

    def placed(self, place: torch.device) -> "Constraint":
        """Return the same constraint for tensors on a device."""
        return replace(self, basis=self.basis.on(place))


class ConstrainedStage(Stage):
    """A stage whose gradients are those of projected weights."""

    def __init__(self, model: Llama, constraint: Constraint, device: Device | None = None) -> None:
        super().__init__(model, device)
        self._constraint = constraint

    def of_weights(self, gradients: Iterable[Tensor]) -> Gradients:
        """As `Stage.of_weights`."""
        return self._constraint.of_gradients(super().of_weights(gradients))


class ConstrainedReplica(PlainReplica):
    """A replica that projects its weights after every step and every write of a method."""

    def __init__(
        self,
        module: nn.Module,
        inner: torch.optim.Optimizer,
        clip_norm: float | None,
        constraint: Constraint,
    ) -> None:
        super().__init__(module, inner, clip_norm)
        self._constraint = constraint

    @property
    def constraint(self) -> Constraint:
        """The constraint on this replica's weights."""
        return self._constraint

    def follow(self, constraint: Constraint) -> None:
        """Switch to another version of the constraint; `settle` or the next write projects the
        weights."""
        self._constraint = constraint

    def settle(self) -> None:
        """Project all weights."""
        self._keep(self._slots.parameters)

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """As `PlainReplica.write`; weights are then projected."""
        super().write(tensors, what, mix)
        if what == "param":
            self._keep(tensors)

    def update(self, names: Sequence[str], whats: Sequence[What], change: BlockChange) -> None:
        """As `PlainReplica.update`; weights are then projected."""
        super().update(names, whats, change)
        if "param" in whats:
            self._keep(names)

    def inner_step(self, lr: float | None = None) -> None:
        """As `PlainReplica.inner_step`; all weights are then projected."""
        super().inner_step(lr)
        self._keep(self._slots.parameters)

    def _keep(self, names: Iterable[str]) -> None:
        self._constraint.keep({name: self._slots.find(name, "param") for name in names})
