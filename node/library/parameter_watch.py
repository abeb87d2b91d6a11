"""Changes of a model's parameters after its optimizer was made, noticed at the next step.

An optimizer and a run know parameters as objects. One that takes the place of another is trained by
nobody and sent to nobody, and torch says nothing about it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farflock.node.errors import Usage
from farflock.node.model.plain_names import plain_parameters

REMEDY = "change values in place, or make a new optimizer for the changed model in a new run"


class _Known(NamedTuple):
    """A parameter as the run knows it."""

    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    trained: bool


class ParameterWatch:
    """The parameters of a model at the time at which its optimizer was made.

    A trained one may be frozen for a while, as fine-tuning in stages and GANs do: it then has no
    gradient, and only rounds move it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {
            name: _Known(entry, entry.dtype, entry.shape, entry.requires_grad)
            for name, entry in plain_parameters(model).items()
        }
        self._trained = {name for name, known in self._known.items() if known.trained}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in the model's order."""
        return {name: known.parameter for name, known in self._known.items() if known.trained}

    def check(self) -> None:
        """Raise `Usage` that names the first parameter that was replaced, added, removed, unfrozen,
        or changed in type or shape, and any gradient that is sparse.

        A frozen parameter may be added or replaced: it is not trained. Takes less than 1 ms for 300
        parameters, as no value is read."""
        seen = set()
        for name, entry in plain_parameters(self._model).items():
            if entry.requires_grad or name in self._trained:
                self._compare(name, entry)
                seen.add(name)
        for name in self._known:  # in the model's order
            if name in self._trained and name not in seen:
                raise _refused(name, "it is no longer in the model under this name", REMEDY)

    def like_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a method's tensors by these names, those of complex parameters as complex ones."""
        return {
            name: torch.view_as_complex(x) if self._known[name].dtype.is_complex else x
            for name, x in tensors.items()
        }

    def checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that checks the model once more when it has made the gradients."""

        def then_check() -> Any:  # noqa: ANN401 - torch's
            returned = closure()
            self.check()
            return returned

        return then_check

    def _compare(self, name: str, entry: nn.Parameter) -> None:
        known = self._known.get(name)
        if known is None:
            raise _refused(name, "it was added after the optimizer was made", REMEDY)
        if entry is not known.parameter:
            if not _is_gathered(entry, known):
                raise _refused(name, "it was replaced after the optimizer was made", REMEDY)
        elif not known.trained:
            why = "it was frozen when the optimizer was made, so the run does not train it"
            raise _refused(
                name, why, "freeze it after the optimizer is made, and unfreeze it when you like"
            )
        elif entry.dtype != known.dtype:
            why = f"its type was changed from {known.dtype} to {entry.dtype}"
            raise _refused(name, why, "convert the model before the optimizer is made")
        elif entry.shape != known.shape:
            why = f"its shape was changed from {tuple(known.shape)} to {tuple(entry.shape)}"
            raise _refused(name, why, REMEDY)
        elif entry.grad is not None and entry.grad.is_sparse:
            raise sparse_gradient(name)


def _is_gathered(entry: nn.Parameter, known: _Known) -> bool:
    """Return whether FSDP shows this for a while, between two passes, in place of its shards: it
    puts them back, whatever a program has put there."""
    in_shards, whole = hasattr(known.parameter, "to_local"), not hasattr(entry, "to_local")
    return in_shards and whole and entry.shape == known.shape


def sparse_gradient(name: str) -> Usage:
    """Return the refusal of a parameter whose gradients are sparse."""
    return _refused(name, "its gradients are sparse", "use the layer with sparse=False")


def _refused(name: str, why: str, remedy: str) -> Usage:
    return Usage(f"parameter {name}", why, remedy)
