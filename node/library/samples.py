"""The samples of prepared data for a user's own loop, as a node of the run would get them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from farflock.node.data.folder import PreparedFolder
from farflock.node.data.samples import FolderShards, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.errors import Usage
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.model.data import Batches, Start


class SampleDataset(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of prepared data without end: inputs and next tokens, int64 (batch, seq).

    The workers of a `DataLoader` (with `batch_size=None`) share them out, and it gives them back in
    their order. `state_dict` is the place after the last batch that this object gave. With workers,
    that is each one's own, which torchdata's `StatefulDataLoader` asks for."""

    def __init__(self, folder: Path, stream: SampleStream, batch: int, seq: int) -> None:
        self._folder, self._stream, self._sizes = folder, stream, (batch, seq)
        self._cursor, self._number, self._shared = b"", 0, True
        self._batches: Batches | None = None
        self._opened()  # so that a mistake is seen at once

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches from the place of this object on."""
        worker = get_worker_info()
        count = 1 if worker is None else worker.num_workers
        batches, number = self._opened(), self._number
        if worker is not None and self._shared:
            number += worker.id
        while True:
            found = batches.batch(number)
            number += count
            self._number, self._shared = number, worker is None
            yield found

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch."""
        return {"cursor": self._opened().cursor(self._number).hex()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the place of a state dict; raise `BadCursor` if it is that of other data."""
        try:
            self._cursor = bytes.fromhex(state_dict["cursor"])
        except (KeyError, TypeError, ValueError):
            why = "it has no place in prepared data"
            raise Usage("the state cannot be loaded", why, "load one of this dataset") from None
        self._number, self._shared, self._batches = 0, get_worker_info() is None, None
        self._opened()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: it opens the folder itself."""
        place = bytes.fromhex(self.state_dict()["cursor"])
        return {**self.__dict__, "_batches": None, "_cursor": place, "_number": 0}

    def _opened(self) -> Batches:
        if self._batches is None:
            content = PreparedFolder(self._folder)
            text, start = Text((FolderShards(content),), (1.0,)), Start(self._cursor)
            self._batches = Batches(text, self._stream, *self._sizes, start=start)
        return self._batches


def samples(
    optimizer: SwarmOptimizer, folder: str | Path, *, batch: int, seq: int
) -> SampleDataset:
    """Return this peer's batches of a folder that `farflock data prepare` made.

    Which samples these are depends on the run's seed, the data, this peer, and in a program of
    several processes on the rank: no other peer has a say in it, and within an epoch none comes
    twice. Raise `BadIndex` for a folder that is none or is damaged, and `TooShort` if no shard has
    a sequence."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    stream = SampleStream(optimizer.seed, optimizer.peer, rank)
    return SampleDataset(Path(folder).expanduser(), stream, batch, seq)
