"""Weights that a program changes outside of a step: an old checkpoint that is loaded after joining
would be taken as work, and drag everybody back.

A change shows in torch's version counter or in the address of a parameter, without a pass over its
values. How far it went is measured on a few values of the model.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from farflock.node.errors import Usage
from farflock.node.library.presence import OptimizerNode
from farflock.node.library.telling import tell
from farflock.node.model.replica import PlainReplica, in_memory_order
from farflock.node.train.ending import start_over
from farflock.optimizers.parts.blocks import as_real

OnJump = Literal["refuse", "adopt", "keep"]

CHOICES = ("refuse", "adopt", "keep")
SAMPLED = 32  # parameters
VALUES = 1024  # of these together
MAX_SAID = 300  # characters of a name or a refusal that another process tells
TRAINERS = ("transformers.trainer", "lightning.", "pytorch_lightning.")


class _Mark(NamedTuple):
    """The version of a parameter, and version and address of the tensor that holds it here."""

    version: int
    here: int
    address: int


class WeightChange(msgspec.Struct, frozen=True):
    """Weights that were changed outside of a step: the first one's name ("": none is known), how
    far all went, and how far the last whole round did (infinitely, if there was none)."""

    name: str = ""
    moved: float = 0.0
    by_round: float = math.inf

    def beside(self, other: "WeightChange") -> "WeightChange":
        """Return the change of both, which are of different rows of the same parameters."""
        name = self.name if self.moved else other.name
        moved = math.hypot(self.moved, other.moved)
        return WeightChange(name, moved, math.hypot(self.by_round, other.by_round))


class JumpWatch:
    """The weights of a model at the end of the last step; of shards, the rows of this process."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._marks: dict[str, _Mark] = {}
        self._views: list[Tensor] = []
        self._round: object = None
        self.mark()
        self._ends: tuple[Tensor, ...] = (self._seen,)  # of the last two rounds: at most one whole

    def mark(self, last_round: object = None) -> None:
        """Note the present weights: a step is over, and this was the last round."""
        marks = {name: _mark(entry) for name, entry in self._parameters.items()}
        if [mark.address for mark in marks.values()] != [x.address for x in self._marks.values()]:
            self._views = _views(self._parameters.values())
        self._marks, self._seen = marks, self._sample()
        if last_round is not self._round:
            self._round, self._ends = last_round, (self._ends[-1], self._seen)

    def changed(self) -> str | None:
        """Return the first parameter that was changed since the last mark, or None."""
        for name, entry in self._parameters.items():
            if _mark(entry) != self._marks[name]:
                return name
        return None

    def moved(self) -> float:
        """Return how far the change went: 0 if all sampled values are as they were."""
        self._views = _views(self._parameters.values())
        return _distance(self._sample(), self._seen)

    def change(self, *, has_all: bool) -> WeightChange:
        """Return what was changed since the last mark. `has_all`: no other process has a part of
        the model, so that the last round, which a device would have to copy, matters only if
        something was changed here."""
        name = self.changed()
        if name is None and has_all:
            return WeightChange()
        moved = 0.0 if name is None else self.moved()
        by_round = _distance(*self._ends) if len(self._ends) == 2 else math.inf
        return WeightChange((name or "")[:MAX_SAID], moved, by_round)

    def with_gradients(self, work: Callable[[], object]) -> None:
        """Do work that drops the gradients, and put them back."""
        held = {name: x.grad.clone() for name, x in self._parameters.items() if x.grad is not None}
        work()
        for name, gradient in held.items():
            self._parameters[name].grad = gradient

    def _sample(self) -> Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0, dtype=torch.float32)


class Jumps:
    """An optimizer's answer to changes that `JumpWatch` finds, once it is in its run."""

    watch: JumpWatch

    def __init__(self, on_jump: str | None) -> None:
        if on_jump is not None and on_jump not in CHOICES:
            raise Usage(f"on_jump={on_jump!r}", "no such answer is known", f"choose from {CHOICES}")
        self._on_jump, self._said = on_jump, False

    def answer(
        self,
        change: WeightChange,
        here: OptimizerNode,
        is_first: bool,
        call: Callable[..., Any],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Do what the program wishes if it has changed weights since the last step, in this process
        or another one of this peer; return True if the run's took their place, so that the present
        gradients mean nothing.

        Raise `Usage` if it wishes to be told. A first step of a peer alone begins the run with
        the new weights."""
        name = change.name
        if not change.moved:
            return False
        if here.peer.alone:
            if is_first:
                self.watch.with_gradients(lambda: call(lambda: begin_again(here)))
            return False
        if not (is_first or change.moved > change.by_round):
            self._say(f"parameter {name} and perhaps others were changed outside of a step")
            return False
        when = "after this peer joined" if is_first else "farther than the last round moved them"
        why = f"its values, and perhaps others, were changed outside of a step, {when}"
        match self._on_jump or ("adopt" if _under_trainer() else "refuse"):
            case "keep":
                self._say(f"parameter {name}: {why}")
                return False
            case "adopt":
                with waiting():
                    call(lambda: start_over(here.loop, f"parameter {name}: {why}"))
                return True
        remedy = (
            'load weights before the optimizer is made, or choose on_jump="adopt" to go on from'
            ' the run\'s weights, or on_jump="keep" to bring yours into the run'
        )
        raise Usage(f"parameter {name}", why, remedy)

    def _say(self, what: str) -> None:
        """Say it once."""
        if not self._said:
            tell(f"{what}; rounds count that as work of this peer")
        self._said = True


async def begin_again(here: OptimizerNode) -> None:
    """Let a run that has made no step begin with the weights that are in the model now."""
    driver = here.loop.driver
    replica = driver.replica

    def begin() -> None:
        state = here.terms.build().snapshot(replica)
        held = {} if isinstance(replica, PlainReplica) else replica.read(replica.names, "grad")
        driver.cuts.before_change()
        driver.method.restore(replica, state, "adopt")
        replica.write(held, "grad")  # of other ranks, which `with_gradients` does not see

    await here.loop.compute(begin)


def _under_trainer() -> bool:
    """Return whether a trainer makes this step: it loads checkpoints after the optimizer is made,
    as its users expect."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(TRAINERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _held(entry: nn.Parameter) -> Tensor:
    """Return the tensor that holds a parameter in this process: of a shard, its rows."""
    if type(entry) is nn.Parameter or not hasattr(entry, "to_local"):
        return entry
    with torch.no_grad():  # else it would be a view with a version of its own
        rows: Tensor = entry.to_local()
    return rows


def _mark(entry: nn.Parameter) -> _Mark:
    here = _held(entry)
    with contextlib.suppress(RuntimeError):  # a device may keep its addresses to itself
        return _Mark(entry._version, here._version, here.data_ptr())
    return _Mark(entry._version, here._version, 0)


def _views(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return views of a few values of a few parameters, on the device of the first."""
    held = [x.detach() for x in map(_held, parameters) if x.numel()]
    here = [x for x in held if x.device == held[0].device]
    chosen = here[:: -(-len(here) // SAMPLED) or 1]
    views = []
    for entry in chosen:
        x = as_real(entry)
        flat = in_memory_order(x).reshape(-1)
        views.append(flat[:: -(-len(flat) * len(chosen) // VALUES)])
    return views


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference; infinity where values are not finite."""
    found = float((one.cpu().double() - other.cpu().double()).norm())
    return found if found == found else float("inf")
