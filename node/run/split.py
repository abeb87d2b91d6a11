"""How a model's layers are cut into consecutive stages."""

from collections.abc import Sequence

from farflock.node.model.llama import ModelConfig


class BadSplit(ValueError):
    """A model cannot be cut this way; the message says why and what to choose."""


def split(config: ModelConfig, sizes: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, of which there may be unequally many. The first stage also embeds, the last one has the norm
    and the head."""
    if not sizes or min(sizes) < 1:
        raise BadSplit(f"stages of {list(sizes)} layers: each needs one or more")
    if sum(sizes) != config.layers:
        raise BadSplit(f"stages of {list(sizes)} layers are {sum(sizes)} in all, the model has {config.layers}")
    if config.tied and len(sizes) > 1:
        raise BadSplit("a model whose head is its embedding cannot be split into stages; set tied to false")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def even(config: ModelConfig, stages: int) -> tuple[range, ...]:
    """So many stages of nearly equally many layers, larger ones in the middle: the ends embed and predict."""
    if not 1 <= stages <= config.layers:
        raise BadSplit(f"{config.layers} layers make 1 to {config.layers} stages, not {stages}")
    small, rest = divmod(config.layers, stages)
    first = (stages - rest) // 2
    return split(config, [small + (first <= index < first + rest) for index in range(stages)])


def nearest_divisor(number: int, wished: int) -> int:
    """The divisor of a number that is nearest to the wished one, the smaller of two."""
    divisors = (d for d in range(1, 2 * wished) if number % d == 0)  # any other one is farther away than 1
    return min(divisors, key=lambda d: (abs(d - wished), d))
