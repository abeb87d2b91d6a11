"""Outer state in memory-mapped files: the system keeps in memory what fits, and writes the rest.

The files have no names: their room is free again when the process ends, however it ends. A state
that must survive is in a checkpoint.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from farflock.node.errors import Failure

MIN_FILE_BYTES = 1024 * 1024  # smaller tensors stay in memory
VALUE_BYTES = 4


class OuterFiles:
    """Memory for tensors, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return float32 zeros; raise `Failure` if the disk has no room for them."""
        count = math.prod(shape)
        if count * VALUE_BYTES < MIN_FILE_BYTES:
            return torch.zeros(tuple(shape), dtype=torch.float32)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".outer") as file:
                _reserve(file.fileno(), count * VALUE_BYTES)
                flat = torch.from_file(file.name, shared=True, size=count, dtype=torch.float32)
        except OSError as error:
            raise Failure(
                f"{self._folder} cannot hold the outer state",
                f"{count * VALUE_BYTES:,} bytes more: {str(error.strerror).lower()}",
                "make room there, or keep the outer state in memory (--outer host)",
            ) from None
        return flat.view(tuple(shape))


def _reserve(file: int, size: int) -> None:
    """Take the room at once: a mapped page that the disk cannot hold later ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        zeros = bytes(MIN_FILE_BYTES)
        for start in range(0, size, MIN_FILE_BYTES):
            os.write(file, zeros[: size - start])
