"""The program's own model with the method's parameters to evaluate in it, as long as a block lasts.

They are in the same tensors, so that whatever evaluates or saves the model needs to know nothing.
"""

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from farflock.node.errors import Usage
from farflock.node.library.model_check import is_double
from farflock.node.library.presence import OptimizerNode
from farflock.node.library.rank_calls import RankCalls
from farflock.optimizers.method import Tensors

SAVE = "save_pretrained"
Work = Callable[[OptimizerNode], Coroutine[Any, Any, Tensors]]


class EvaluatedModel:
    """A model, and whether it holds the parameters to evaluate just now."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], ranks: RankCalls
    ) -> None:
        self._model, self._trained, self._ranks = model, trained, ranks
        self._inside = 0

    @contextlib.contextmanager
    def block(self, do: Callable[[Work], Tensors]) -> Iterator[None]:
        """Put the parameters in, and the program's own back after the block, bit for bit. In the
        rank that is the peer, `do` runs work on its node."""
        doubles = {name: x.detach().clone() for name, x in self._trained.items() if is_double(x)}
        with self._ranks.together() as leads:
            own = do(_show) if leads else {}
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            with self._ranks.together() as leads:
                if leads:
                    do(partial(_put, tensors=own))
            with torch.no_grad():  # of these, float32 is not all
                for name, values in doubles.items():
                    self._trained[name].copy_(values)

    def require_own(self) -> None:
        """Raise `Usage` while the model holds other parameters than the program's own."""
        if self._inside:
            why = "the model holds the parameters to evaluate, until evaluating() is over"
            raise Usage("no step can be made", why, "leave the `with` block first")

    def saving(self) -> Callable[..., object]:
        """Return the model's own method that saves it; raise `Usage` if it has none that works."""
        save: Callable[..., object] | None = getattr(self._model, SAVE, None)
        kind, remedy = type(self._model).__name__, "save what eval_params() returns"
        if save is None:
            raise Usage(SAVE, f"a {kind} has no method of this name", remedy)
        if any(hasattr(entry, "to_local") for entry in self._trained.values()):
            raise Usage(SAVE, f"this process has only a shard of the {kind}", remedy)
        return save


async def _show(here: OptimizerNode) -> Tensors:
    """Let the model hold the parameters to evaluate; return its own."""
    replica = here.loop.driver.replica
    own = await here.loop.compute(lambda: replica.read(replica.names, "param"))
    await _put(here, await here.eval_params())
    return own


async def _put(here: OptimizerNode, tensors: Tensors) -> Tensors:
    driver = here.loop.driver

    def write() -> Tensors:
        driver.cuts.before_change()
        driver.replica.write(tensors, "param")
        return tensors

    return await here.loop.compute(write)
