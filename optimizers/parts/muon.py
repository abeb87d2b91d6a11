"""Muon for hidden matrices and AdamW for the rest, as one optimizer with one learning rate (Jordan
et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, section 2.2
for the common rate).

Callers see one optimizer with groups and moments; torch's two optimizers do the arithmetic on these
same objects.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Group = dict[str, Any]


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that Muon is for: matrices that map hidden vectors to hidden
    vectors.

    Excluded are embeddings, whose rows are looked up one at a time; the output head, which is tied
    to one, or is the module's last matrix with an embedding's shape; and anything that is not 2-D
    and real (norms, biases, convolutions).
    """
    embeddings = [
        optimizer.weight for optimizer in module.modules() if isinstance(optimizer, nn.Embedding)
    ]
    matrices = [
        entry for entry in module.parameters() if entry.dim() == 2 and not entry.is_complex()
    ]
    outside = {id(entry) for entry in embeddings}
    if matrices and matrices[-1].shape in {entry.shape for entry in embeddings}:
        outside.add(id(matrices[-1]))
    return [entry for entry in matrices if entry.requires_grad and id(entry) not in outside]


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of `muon` groups, AdamW for the parameters of `adamw` groups.

        M <- mu·M + (1-mu)·G;  O = NS5((1-mu)·G + mu·M)
        theta <- theta - lr·wd·theta - lr·0.2·sqrt(max(rows, columns))·O

    NS5 is five Newton-Schulz steps towards the nearest orthogonal matrix, in bf16. The factor
    0.2·sqrt(...) gives both updates the same root mean square, so that AdamW's rate, decay and
    schedule are right for both. Deviation from Jordan's first version: that factor, for sqrt(max(1,
    rows/columns)) there, and the decay. `ValueError` where torch has no Muon (before 2.9).
    """

    def __init__(
        self,
        muon: list[Group],
        adamw: list[Group],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"muon needs torch 2.9 or newer, this is {torch.__version__}; "
                "update it or choose adamw"
            )
        self._optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self._optimizers.append(
                torch.optim.Muon(muon, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            )
        if adamw:
            self._optimizers.append(torch.optim.AdamW(adamw, lr, betas=betas, eps=eps))
        super().__init__(
            [group for optimizer in self._optimizers for group in optimizer.param_groups],
            {"lr": lr},
        )
        self._share()

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Return the optimizer that steps this parameter."""
        return next(
            optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(entry is parameter for entry in group["params"])
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - torch's
        """Call `closure` if given, step both optimizers, and return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does; both parts see it."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Share groups and moments with both parts, for schedulers, checkpoints and replicas."""
        groups: Iterator[Group] = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.state = self.state
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
