"""The content of past rounds in files without names: a member that was away may ask for it, and it
takes no memory until then."""

import itertools
import logging
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from farflock.node.state.cut import raw
from farflock.swarm.chunk_store import Chunk
from farflock.swarm.compute import Compute

log = logging.getLogger(__name__)


class Shelf:
    """Files of a folder that chunks are moved to; `compute` is the worker that writes them."""

    def __init__(self, folder: Path, compute: Compute) -> None:
        self._folder, self._compute = folder, compute

    async def __call__(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Return the chunks as views of a file; as they are, if the disk has no room for them."""
        return await self._compute(partial(self._write, chunks))

    def _write(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".round") as file:
                size = sum(map(file.write, chunks))
                file.flush()
                # written and then mapped, its pages are in memory only where they are read
                flat = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as reason:  # torch's, if the file cannot be mapped
            log.warning("a round's content stays in memory: %s", reason)
            return chunks
        whole = raw(flat).toreadonly()
        ends = itertools.accumulate(map(len, chunks))
        return [whole[end - len(chunk) : end] for chunk, end in zip(chunks, ends, strict=True)]
