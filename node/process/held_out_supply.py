"""The held-out shards that a run is evaluated on, on their way to a machine without a folder.

They come below the shards that training waits for, one at a time, and once: their sequences stay in
memory. Until then the node passes its turns to evaluate (node/train/evaluator.py).
"""

import asyncio
import logging
import math

from farflock.node.assembly.held_out_rows import HeldOutRows, HeldOutShard
from farflock.node.data.index import BadIndex
from farflock.node.process.data_supply import GIVE_UP_S, DataSupply

TRY_EVERY_S = 2.0

log = logging.getLogger(__name__)


class HeldOutSupply:
    """Brings the shards that are missing of a run's held-out sequences."""

    def __init__(self, supply: DataSupply, rows: HeldOutRows) -> None:
        self._supply, self._rows, self._warned = supply, rows, False

    async def run(self) -> None:
        """Bring one shard after the other; end once all are here."""
        try:
            for shard in list(self._rows.missing):
                await self._bring(shard)
        except BadIndex as error:
            log.warning("this node cannot evaluate the run: %s", error)

    async def _bring(self, shard: HeldOutShard) -> None:
        source, since_s = self._supply.sources[shard.source], math.inf
        while True:
            if not self._supply.presses:
                tokens = await self._supply.tokens(source, shard.number)
                if tokens is not None:
                    self._rows.take(shard, tokens)
                    return
                since_s = min(since_s, _now())
                if not self._warned and _now() - since_s >= GIVE_UP_S:
                    self._warned = True
                    log.warning(
                        "nobody has the held-out shard %s… of the run's data: this node cannot"
                        " evaluate the run until a member has it",
                        source.local.table.digest(shard.number).hex()[:16],
                    )
            await asyncio.sleep(TRY_EVERY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
