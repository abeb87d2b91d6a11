"""The rounds that name microbatches: those of a method's first stream, or counts of their own
(docs/decisions/038)."""

from collections.abc import Mapping, Sequence
from typing import Any

from farflock.node.model.shapes import ShapeReplica
from farflock.optimizers.method import All, Exchange, Method
from farflock.optimizers.parts.stateful import StepSchedule


def placeholder_streams(made: Method, layers: int) -> list[Exchange]:
    """Return a method's exchanges for a stage of so many layers, with placeholders for tensors: for
    rules that do not depend on sizes."""
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(layers)]
    return made.streams(ShapeReplica(dict.fromkeys(names, (8, 8))))


def has_whole_rounds(streams: Sequence[Exchange]) -> bool:
    """Return whether the first stream's rounds take in all work of each member, entirely or not at
    all, and at once."""
    return (
        bool(streams)
        and streams[0].stride == 1
        and all(each.group == All() and not each.apply_after for each in streams)
    )


def is_counted_apart(made: Method, streams: Sequence[Exchange]) -> bool:
    """Return whether counts of their own name the microbatches of a method: where it has no whole
    rounds, or each member has weights of its own. The method says after which steps it merges."""
    needs = not has_whole_rounds(streams) or made.equality == "per-peer"
    return needs and isinstance(made, StepSchedule)


def count_steps(made: Method, layers: int, count_every: int) -> int:
    """Return the steps between rounds that name microbatches; `count_every` of them, if these are
    counts of their own."""
    apart = is_counted_apart(made, placeholder_streams(made, layers))
    return count_every if apart else steps_of(made)


def steps_of(options: Method | Mapping[str, Any]) -> int:
    """Return the steps between rounds of a method's first stream, for a method or its options."""
    for name in ("mask_period", "period"):
        found = options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)
        if isinstance(found, int):
            return found
    return 1
