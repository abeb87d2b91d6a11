"""Work of ours in a thread of the user's, whose default device is not ours to follow."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Closure = Callable[[], Any]


@contextlib.contextmanager
def own_defaults(closure: Closure | None) -> Iterator[Closure | None]:
    """Let tensors that name no device be on the CPU in the block, as in a program that sets none;
    yield a closure that still follows the program's."""
    device = torch.empty(0, dtype=torch.float32).device
    if device.type == "cpu":  # nearly always, and then nothing is slower
        yield closure
        return

    def as_they_set_it() -> Any:  # noqa: ANN401 - torch's
        assert closure is not None
        with device:
            return closure()

    with torch.device("cpu"):
        yield closure and as_they_set_it
