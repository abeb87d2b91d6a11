"""Cut a model's tensors by stages, and join the pieces of any other cut.

A stage's tensors have the names of the whole model, so a checkpoint of four stages can be read as
one model or as three stages. Names may have a prefix (`param.`, `exp_avg.`), as in checkpoints.
"""

import functools
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from farflock.node.model.hf_shape import HfShape
from farflock.node.model.llama import Llama, ModelConfig

_NAME = re.compile(r"(?:.*?\.)??((?:model|lm_head)\..+)", re.S)


class Misfit(ValueError):
    """Tensors that do not make up the wanted stage or model; the message names one."""


def shapes_of(config: ModelConfig, span: range) -> dict[str, tuple[int, ...]]:
    """Return a stage's tensor names and shapes, in order, without allocating the tensors. A
    model of transformers has no stages."""
    if isinstance(config, HfShape):
        return dict(config.facts.shapes)
    with torch.device("meta"):
        return {
            name: tuple(tensor.shape) for name, tensor in Llama(config, span).named_parameters()
        }


@functools.cache
def names_of(config: ModelConfig, span: range) -> frozenset[str]:
    """Return the names of a stage's tensors, without allocating them."""
    return frozenset(shapes_of(config, span))


def cut(tensors: Mapping[str, Tensor], config: ModelConfig, span: range) -> dict[str, Tensor]:
    """Return a stage's tensors: for each prefix, all of them or none. Raise `Misfit` if one is
    missing."""
    wanted = names_of(config, span)
    found = {name: tensor for name, tensor in tensors.items() if _bare(name) in wanted}
    for prefix in sorted({name.removesuffix(_bare(name)) for name in found} or {""}):
        if lacking := sorted(name for name in wanted if prefix + name not in found):
            raise Misfit(
                f"layers {span.start} to {span.stop - 1} lack {len(lacking)} tensors, such as "
                f"{prefix}{lacking[0]}"
            )
    return found


def joined(pieces: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return several stages' tensors together; raise `Misfit` if two pieces disagree on a
    tensor."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        for name, tensor in piece.items():
            if name in whole and not torch.equal(whole[name], tensor):
                raise Misfit(
                    f"{name} differs between two pieces, which were saved at different times; "
                    "use one of them"
                )
            whole[name] = tensor
    return whole


def _bare(name: str) -> str:
    matched = _NAME.fullmatch(name)
    return matched[1] if matched else name
