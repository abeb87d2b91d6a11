"""The sizes that a founder's `[model]` table leaves out."""

from typing import Any, TypeGuard

HEAD_DIM = 64  # the widest head that is chosen
EXPERTS_PER_TOKEN = 2
BALANCE = 0.01  # Switch Transformer's weight (arXiv:2101.03961, section 2.2)
FFN_MULTIPLE = 64  # of the inner width: products of such widths are fast on GPUs


def completed(sizes: dict[str, Any], seq: object) -> dict[str, Any]:
    """Return a model's sizes with those that follow from others.

    Heads are as wide as an even divisor of `dim` can be, up to 64; each has its own keys and
    values; the SwiGLU block is 8/3 of `dim` wide, rounded up to a multiple of 64 (arXiv:2002.05202
    keeps the weights of two matrices of 4 dim so); the context is a sequence of training. What is
    no whole number is left to whoever reads the table."""
    sizes = dict(sizes)
    dim = sizes.get("dim")
    if _is_whole(dim):
        sizes.setdefault("heads", heads_of(dim))
        sizes.setdefault("ffn_dim", -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE)
    if "heads" in sizes:
        sizes.setdefault("kv_heads", sizes["heads"])
    if _is_whole(seq):
        sizes.setdefault("context", seq)
    return sizes


def with_experts(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return a model's sizes with what its router needs, if it has experts."""
    if sizes.get("experts") is None:
        return sizes
    given = {name: value for name, value in sizes.items() if value is not None}
    return {"experts_per_token": EXPERTS_PER_TOKEN, "balance": BALANCE} | given


def heads_of(dim: int) -> int:
    """Return the number of the widest even heads up to `HEAD_DIM`; 1 if `dim` is odd, which is
    refused later."""
    widths = range(HEAD_DIM, 0, -2)
    return next((dim // width for width in widths if dim % width == 0), 1)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
