"""Cuts of a model's layers into consecutive stages."""

from collections.abc import Sequence

from farflock.node.model.llama import ModelConfig


class BadSplit(ValueError):
    """A model cannot be cut this way; the message says why and what to choose."""


def split(config: ModelConfig, sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each stage, given the stages' sizes. The first stage also embeds; the
    last also has the norm and the head. Raise `BadSplit` if the sizes do not fit the model."""
    if not sizes or min(sizes) < 1:
        raise BadSplit(f"stages of {list(sizes)} layers: each stage needs one layer or more")
    if sum(sizes) != config.layers:
        raise BadSplit(
            f"stages of {list(sizes)} layers have {sum(sizes)} in total,"
            f" the model has {config.layers}"
        )
    if config.tied and len(sizes) > 1:
        raise BadSplit(
            "a model whose head is its embedding cannot be split into stages;"
            " set model.tied to false"
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def even(config: ModelConfig, stages: int) -> tuple[range, ...]:
    """Return `stages` nearly equal stages. The larger ones are in the middle, because the ends
    also embed and predict."""
    if not 1 <= stages <= config.layers:
        raise BadSplit(
            f"{config.layers} layers can be cut into 1 to {config.layers} stages, not {stages}"
        )
    small, rest = divmod(config.layers, stages)
    first = (stages - rest) // 2
    return split(config, [small + (first <= index < first + rest) for index in range(stages)])


def nearest_divisor(number: int, wished: int) -> int:
    """Return the divisor of `number` nearest to `wished`; of two equally near, the smaller."""
    # a divisor of 2 * wished or more is farther away than 1
    divisors = (d for d in range(1, 2 * wished) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - wished), d))
