"""The methods under disasters: the whole catalogue, with short rounds, on a replica of counters.

Such a replica is cheap to train and easy to check: a gradient shows whose step it was, and a
handful of steps contains rounds of every stream.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflock.node.errors import Usage
from farflock.node.simulate.invariants import DEADLINE_S, TOKENS_PER_STEP
from farflock.optimizers.catalog import METHODS, method, options_of
from farflock.optimizers.method import Exchange, Method, Progress, RandomGroups, Tensors, What
from farflock.optimizers.parts.blocks import BlocksOfWhole
from farflock.optimizers.trial_options import disasters_of

SIZES: Mapping[str, int] = {"a": 12, "b": 5}  # values of each tensor
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
STEP_S = 0.5
FP32 = {"codec": "fp32", "return_codec": "fp32"}
PHASES = {  # phase of an exchange by message tag
    b"offer": "offer",
    b"pair": "offer",
    b"pair+": "offer",
    b"want": "transfer",
    b"piece": "transfer",
    b"reduced": "reduced",
    b"holds": "held",
    b"have": "held",
    b"propose": "vote",
    b"accepted": "vote",
    b"prepare": "vote",
    b"promise": "vote",
    b"decided": "decided",
    b"commit": "decided",
}
PAIR_PHASES = ("decided", "held", "offer", "transfer")


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """A method with its options, the seconds of a local step, and the sizes of its tensors."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    step_s: float = STEP_S
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)

    def replica(self, place: int) -> "CountingReplica":
        """Return the replica that peer number `place` trains."""
        return CountingReplica(place, self.sizes, moments=self.method == "desloc")

    @property
    def all_options(self) -> dict[str, Any]:
        """The method's options, with the deadline `DEADLINE_S` for its exchanges."""
        deadline = {"deadline_s": DEADLINE_S} if "deadline_s" in options_of(self.method) else {}
        return {**deadline, **self.options}

    def make(self) -> Method:
        """Return a new method whose exchanges have the deadline `DEADLINE_S`."""
        return method(self.method, **self.all_options)

    def streams(self) -> list[Exchange]:
        """Return a template exchange of each stream."""
        return self.make().streams(self.replica(0))

    def phases(self) -> tuple[str, ...]:
        """Return the phases of this case's exchanges, if it has any: pairs do not vote, and only
        means are reduced."""
        streams = self.streams()
        if any(isinstance(entry.group, RandomGroups) for entry in streams):
            return PAIR_PHASES
        found = set(PHASES.values()) if streams else set()
        if not any(entry.kind == "mean" for entry in streams):
            found.discard("reduced")
        return tuple(sorted(found))


def _declared(methods: Mapping[str, type[Any]]) -> tuple[ChaosCase, ...]:
    """Return all disasters (optimizers/trial_options.py) by `turn`; those without one come last."""
    named = [(name, one) for name, made in methods.items() for one in disasters_of(made)]
    named.sort(key=lambda entry: math.inf if entry[1].turn is None else entry[1].turn)
    return tuple(ChaosCase(name, one.options, one.step_length * STEP_S) for name, one in named)


ARMS = _declared(METHODS)


def cases_of(name: str | None = None) -> tuple[ChaosCase, ...]:
    """Return all cases, or those of one method; raise `Usage` if it is unknown."""
    if name is not None and name not in METHODS:
        choices = ", ".join(METHODS)
        raise Usage(f"{name[:64]!r}", "there is no method of this name", f"choose from {choices}")
    return tuple(arm for arm in ARMS if name in (None, arm.method))


def case_of(seed: int, name: str | None = None) -> ChaosCase:
    """Return the case that a seed runs, of all methods or of the named one."""
    arms = cases_of(name)
    return arms[seed % len(arms)]


class CountingReplica(BlocksOfWhole):
    """A few tensors in which each local step adds a value at its peer's place. The inner optimizer
    is gradient descent at a rate of 1; `moments` adds unused means of the gradient and its
    square."""

    def __init__(self, place: int, sizes: Mapping[str, int], *, moments: bool = False) -> None:
        self._place, self._sizes = place, sizes
        kept = ("param", "grad", *MOMENTS) if moments else ("param", "grad")
        self._tensors = {what: self._zeros() for what in kept}

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(size, dtype=torch.float32) for name, size in self._sizes.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._sizes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, each flat."""
        return {name: (size,) for name, size in self._sizes.items()}

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return copies; tensors that are not kept read as zeros."""
        kept = self._tensors.get(what) or self._zeros()
        return {name: kept[name].clone() for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Overwrite tensors; those that are not kept are ignored."""
        for name, new in tensors.items():
            if what in self._tensors:
                self._tensors[what][name] = new.clone()

    def inner_step(self, lr: float | None = None) -> None:
        """Set theta <- theta - grad."""
        held = self._tensors
        for name, grad in held["grad"].items():
            held["param"][name] = held["param"][name] - grad
            if "step" in held:
                held["exp_avg"][name] = (held["exp_avg"][name] + grad) * 0.5
                held["exp_avg_sq"][name] = (held["exp_avg_sq"][name] + grad * grad) * 0.5
                held["step"][name] = held["step"][name] + 1
        held["grad"] = self._zeros()

    def add_gradient(self, step: int) -> None:
        """Add this peer's gradient of a step: 1 at its own place in the first tensor, and 0.25 at
        the step's place in the last."""
        names = self.names
        for name, at, much in ((names[0], self._place, 1.0), (names[-1], step, 0.25)):
            grad = self._tensors["grad"][name]
            grad[at % len(grad)] += much


@dataclass(slots=True)
class CountingTask:
    """A task that trains a counting replica."""

    replica: CountingReplica
    joined_at: int = 0  # the step at which its node joined

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    @property
    def tokens_per_step(self) -> int:
        """The tokens that the checker counts per step."""
        return TOKENS_PER_STEP

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Compute the gradient; the loss is always 0."""
        self.replica.add_gradient(step)
        return 0.0

    def set_rate(self, tokens: int) -> None:
        """Do nothing: gradients are counts, which no rate scales."""
