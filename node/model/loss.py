"""The head's cross-entropy in chunks of tokens, so that the logits never exist whole.

With a vocabulary of 128k, the logits of 8,192 tokens take 4 GB in float32, and their gradient as
much again. Here each chunk's logits are turned into their gradient in place, which goes into those
of the hidden states and of the head's weights at once, and their memory is used for the next chunk
("Cut Your Losses", arXiv:2411.09009, does the same in one kernel and chunks the vocabulary too).

Shapes: N tokens, D model width, V vocabulary; C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS = 2**25  # at once: 128 MiB in float32, 256 tokens of a vocabulary of 128k

ALIGNED = 64  # rows of a part of a table: products of other numbers of rows are slow on GPUs

# Of logits (C, V), targets (C,) and the type of sums: the summed loss, and the logits' gradient,
# which may take the logits' memory.
ChunkLoss = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def logits_at_once(memory_bytes: int) -> int:
    """Return how many logits may exist at once on a device with so much memory: they and their
    gradient take a fortieth of it at most, or 384 MiB. Larger chunks are faster, since for each
    one the gradient of the whole table is read and written."""
    return min(max(memory_bytes // 512, MAX_LOGITS), 4 * MAX_LOGITS)


def chunk_tokens(vocab_size: int, logits: int | None = None) -> int:
    """Return how many tokens' logits may exist at once, of so many logits (None: `MAX_LOGITS`)."""
    return max((logits or MAX_LOGITS) // vocab_size, 1)


def in_place(logits_CV: Tensor, targets_C: Tensor, sums: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a chunk's loss and gradient, in the logits' memory if they have the type of sums."""
    values_CV = logits_CV.to(sums)
    losses_C, sums_C = _losses_(values_CV, targets_C)
    return losses_C.sum(), _gradient_(values_CV, sums_C, targets_C)


def fusible(logits_CV: Tensor, targets_C: Tensor, sums: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `in_place` does, the gradient in the logits' type, as expressions of which
    torch.compile makes kernels that read the logits twice and write the gradient once."""
    values_CV = logits_CV.to(sums)
    top_C = values_CV.amax(1)
    exponentials_CV = (values_CV - top_C[:, None]).exp()
    sums_C = exponentials_CV.sum(1)
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    losses_C = sums_C.log() + top_C - torch.where(is_target_CV, values_CV, 0.0).sum(1)
    gradient_CV = exponentials_CV / sums_C[:, None] - is_target_CV.to(sums)
    return losses_C.sum(), gradient_CV.to(logits_CV.dtype)


def summed_loss(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    tokens: int,
    chunk_loss: ChunkLoss = in_place,
) -> Tensor:
    """Return the cross-entropy in nats, summed over tokens, with the logits of `tokens` at a time.

    Products are rounded to autocast's type; sums are float32 (float64 for float64 weights). With
    gradients enabled, they are computed here too, by `chunk_loss`; the graph can be differentiated
    once."""
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        loss: Tensor = _SummedLoss.apply(  # type: ignore[no-untyped-call]
            x_ND, weight_VD, targets_N, tokens, chunk_loss
        )
        return loss
    return token_losses(x_ND, weight_VD, targets_N, tokens).sum()


@torch.no_grad()
def token_losses(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, tokens: int) -> Tensor:
    """Return each token's cross-entropy in nats (N,), without gradients."""
    products = _Products(weight_VD)
    chunks = zip(torch.split(x_ND, tokens), torch.split(targets_N, tokens), strict=True)
    with products.as_given():
        return torch.cat(
            [_losses_(products.logits(x).to(products.sums), targets)[0] for x, targets in chunks]
        )


class _Products:
    """Matrix products with the head's weights, in the type that autocast wants here or in theirs.

    `dtype` is that type, and `sums` that of everything else."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._place = weight_VD.device.type
        is_lower = torch.is_autocast_enabled(self._place)
        self.dtype = torch.get_autocast_dtype(self._place) if is_lower else weight_VD.dtype
        self._weight_VD = weight_VD.to(self.dtype)
        self.sums = torch.promote_types(weight_VD.dtype, torch.float32)

    def as_given(self) -> torch.autocast:
        """Let operations in the block keep the types of their arguments."""
        return torch.autocast(self._place, enabled=False)

    def logits(self, x_CD: Tensor) -> Tensor:
        """Return new logits (C, V), in the products' type."""
        return F.linear(x_CD.to(self.dtype), self._weight_VD)

    def to_hidden(self, gradient_CV: Tensor) -> Tensor:
        """Return the gradient of the hidden states (C, D)."""
        return (gradient_CV @ self._weight_VD).to(self.sums)

    def add_to_weight(self, sum_VD: Tensor, gradient_CV: Tensor, x_CD: Tensor) -> None:
        """Add a chunk's gradient of the weights. The product of another type than the sum's takes
        memory of its own, and is computed in parts."""
        x_CD = x_CD.to(self.dtype)
        if self.dtype == self.sums:
            sum_VD.addmm_(gradient_CV.t(), x_CD)
            return
        rows = max(2 * MAX_LOGITS // x_CD.shape[1] // ALIGNED, 1) * ALIGNED
        for rows_of, columns in zip(
            torch.split(sum_VD, rows), torch.split(gradient_CV, rows, 1), strict=True
        ):
            rows_of.add_(columns.t() @ x_CD)


class _SummedLoss(torch.autograd.Function):
    """`summed_loss`, whose forward pass computes the gradients too; the backward pass scales
    them."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        tokens: int,
        chunk_loss: ChunkLoss,
    ) -> Tensor:
        """Return the sum, and keep the gradients."""
        products, losses = _Products(weight_VD), []
        with products.as_given():
            to_x, to_weight = (
                torch.zeros_like(x, dtype=products.sums) if wanted else None
                for x, wanted in zip((x_ND, weight_VD), ctx.needs_input_grad[:2], strict=True)
            )
            for at in range(0, len(x_ND), tokens):
                x_CD, targets_C = x_ND[at : at + tokens], targets_N[at : at + tokens]
                total, gradient_CV = chunk_loss(products.logits(x_CD), targets_C, products.sums)
                losses.append(total)
                gradient_CV = gradient_CV.to(products.dtype)
                if to_x is not None:
                    to_x[at : at + tokens] = products.to_hidden(gradient_CV)
                if to_weight is not None:
                    products.add_to_weight(to_weight, gradient_CV, x_CD)
        ctx.gradients, ctx.dtypes = (to_x, to_weight), (x_ND.dtype, weight_VD.dtype)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        """Return the gradients, scaled in place: autograd adds the gradient of a tied table's
        look-up to the same tensor, and no third one of the table's size exists."""
        if ctx.gradients is None:
            raise RuntimeError(
                "this loss was differentiated before, and its gradients are kept for one backward"
                " pass; compute the loss again"
            )
        found, ctx.gradients = ctx.gradients, None
        to_x, to_weight = (
            None if x is None else x.mul_(grads[0]).to(dtype)
            for x, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return to_x, to_weight, None, None, None


def _losses_(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and the sum by which softmax divides (C,); leave exponentials in
    place of the logits."""
    top_C = logits_CV.amax(1)
    at_targets_C = logits_CV.gather(1, targets_C[:, None])[:, 0] - top_C
    sums_C = logits_CV.sub_(top_C[:, None]).exp_().sum(1)
    return sums_C.log() - at_targets_C, sums_C


def _gradient_(exponentials_CV: Tensor, sums_C: Tensor, targets_C: Tensor) -> Tensor:
    """Turn exponentials into the gradient of the logits: probabilities, less 1 at the targets."""
    exponentials_CV.div_(sums_C[:, None])
    return exponentials_CV.scatter_add_(1, targets_C[:, None], -torch.ones_like(sums_C)[:, None])
