"""A run's prepared data for a user's own loop: the sequences that a node of the run would draw."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from farflock.node.data.index import INDEX_NAME, root_of
from farflock.node.data.sequences import PackedBatches, ShardedText
from farflock.node.errors import FarflockError, Usage
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.process.data_fetch import DataFetcher
from farflock.node.process.data_supply import DataSupply, local_data_at, others_in
from farflock.node.run.data_section import index_bytes_in
from farflock.node.state.paths import data_cache
from farflock.swarm.compute import Worker
from farflock.swarm.tasks import cancel

CACHE_BYTES = 20 * 10**9
_HEX = frozenset("0123456789abcdef")


def samples(
    optimizer: SwarmOptimizer,
    root: str | Path,
    *,
    batch: int,
    seq: int,
    mix: Mapping[str, float] | None = None,
    copies: Sequence[str] = (),
    cache_bytes: int = CACHE_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return this peer's batches of prepared data: inputs and next tokens, int64 (batch, seq).

    `root` is the folder that `farflock data prepare` made or, at peers without it, the root that it
    printed. Shards that are not in a folder come from the members that iterate over the same data,
    or from `copies` (folders and web addresses), ahead of need. Which samples these are depends on
    the run's seed, this peer and their number alone: a program that goes on from a state dict goes
    on at the next sample, if it takes one batch a step. `mix` weighs the sources. Of data that were
    prepared with `--chat`, next tokens that do not count are -100, which torch's losses leave out.

    Raise `Usage` for a root that is neither, and `RefusedByRun` if nobody has the data."""
    node, life = optimizer._here, optimizer._life
    folder, name = _read(root)
    places = (*([str(folder)] if folder is not None else []), *copies)
    local, mirrors = local_data_at(places, name, data_cache(), cache_bytes)
    members = partial(others_in, node.peer)
    chunks = node.peer.context.chunks
    supply = DataSupply(DataFetcher(local, chunks, members, mirrors, Worker("data")), mix)
    text = life.call(supply.text)
    return _batches(optimizer, supply, text, batch, seq)


def _batches(
    optimizer: SwarmOptimizer, supply: DataSupply, text: ShardedText, batch: int, seq: int
) -> Iterator[tuple[Tensor, Tensor]]:
    node, life = optimizer._here, optimizer._life
    stream = PackedBatches(text, node.terms.run.seed, node.peer.me, batch, seq)
    step = [node.loop.step]
    fetching = life.call(partial(_begun, supply, stream, step))
    try:
        while True:
            if not supply.is_ready(step[0]):
                life.call(partial(supply.ready, step[0], lambda: False))
            yield stream.batch(step[0])
            step[0] += 1
    finally:
        with contextlib.suppress(FarflockError):  # the optimizer may be closed already
            life.call(partial(cancel, fetching))


async def _begun(
    supply: DataSupply, stream: PackedBatches, step: list[int]
) -> "asyncio.Task[None]":
    return asyncio.create_task(supply.run(stream, lambda: step[0]))


def _read(root: str | Path) -> tuple[Path | None, str]:
    """Return the folder of the data, if it is one, and the root."""
    path = Path(root)
    if (path / INDEX_NAME).is_file():
        return path, root_of(index_bytes_in(path))
    if isinstance(root, str) and len(root) == 64 and _HEX.issuperset(root):
        return None, root
    raise Usage(
        str(root)[:200],
        "it is neither a folder of prepared data nor a root of 64 hexadecimal digits",
        "make one with `farflock data prepare`, or copy the root that it printed",
    )
