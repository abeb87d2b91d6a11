"""A model's layers compiled by torch, with a way back: where that fails, they run as they are.

Layers are compiled in place, one by one: parameters keep their names, and layers of one shape share
the compiled code. Between a large head's products, its loss is compiled too.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from farflock.node.model import loss
from farflock.node.model.hf_model import AnyModel

log = logging.getLogger("farflock")

Backend = str | Callable[..., object]


class CompiledLayers:
    """The layers of a model, which `settle` has to try before the first step with each number of
    sequences: code is compiled for one shape."""

    def __init__(self, model: AnyModel, backend: Backend = "inductor") -> None:
        self._model, self._backend = model, backend
        self._settled: set[int] = set()  # numbers of sequences
        self.failed = False

    def settle(self, sequences: int, loss_of: Callable[[], Tensor]) -> None:
        """Compile, and compute a loss of so many sequences with its gradients, which are dropped;
        the model's own stay as they are. If anything fails, go back to layers that are not
        compiled, and warn.

        Code is compiled when it is first needed, in the backward pass too. A later call for as many
        does nothing. Raise `torch.OutOfMemoryError` if memory is what is missing; the next call
        tries again."""
        if self.failed or sequences in self._settled:
            return
        try:
            for layer in self._model.blocks():
                layer.compile(backend=self._backend, dynamic=False)
            self._model.chunk_loss = torch.compile(
                loss.fusible, backend=self._backend, dynamic=False
            )
            weights = [x for x in self._model.parameters() if x.requires_grad]
            torch.autograd.grad(loss_of(), weights)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A backend may raise anything. What does not come from it comes again in the step.
            self._give_up(error)
        self._settled.add(sequences)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        for layer in self._model.blocks():
            layer._compiled_call_impl = None  # torch has no public way back
        self._model.chunk_loss = loss.in_place
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning(
            "torch.compile failed, and training goes on without it, more slowly: %s", reason[:200]
        )
