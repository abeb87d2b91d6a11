"""A model's layers by its parameters' names: methods send, judge and mix whole layers."""

from collections.abc import Iterable


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters of each layer, in the model's order: `model.layers.3` of
    `model.layers.3.mlp.up_proj.weight`. A name without a number belongs to its module; one without
    a module is a layer of its own."""
    layers: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdecimal()), None)
        layer = ".".join(words[:-1] if number is None else words[: number + 1]) or name
        layers.setdefault(layer, []).append(name)
    return layers


def is_numbered(layer: str) -> bool:
    """Return whether the layer is one of a stack, not an embedding, a norm or a head."""
    return layer.rpartition(".")[2].isdecimal()
