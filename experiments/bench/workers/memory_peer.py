"""A worker of the memory benchmark: a node that exchanges on command and reports its memory.

`python -m farflock.experiments.bench.workers.memory_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import re
import sys
from pathlib import Path

import msgspec
import psutil
import torch

from farflock.experiments.bench.workers.bare import plan_of
from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import Place, meet, member
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.samples import text_in_memory
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig
from farflock.swarm.compute import Worker

TEXT = "no step is taken, so any text will do. " * 8
DELTA = 1e-3


class Settings(Place, frozen=True):
    """The owner's settings: the model and the codecs."""

    preset: str
    codec: str
    return_codec: str


class Peak:
    """This process's memory now, and its peak since `forget` (outside Linux, since its start)."""

    def __init__(self) -> None:
        self._status = Path("/proc/self/status")
        self._process = psutil.Process()

    def forget(self) -> None:
        """Reset the peak. Freed memory goes back first, or the exchange would reuse it unseen."""
        if sys.platform.startswith("linux"):
            with contextlib.suppress(AttributeError):  # musl lacks this call, and keeps less
                ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def now_bytes(self) -> int:
        """Return the resident memory."""
        return int(self._process.memory_info().rss)

    def highest_bytes(self) -> int:
        """Return the peak since `forget`; on Linux, `ru_maxrss` would begin at the parent's."""
        if not sys.platform.startswith("linux"):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        match = re.search(r"^VmHWM:\s*(\d+) kB$", self._status.read_text(), re.M)
        assert match is not None, "/proc/self/status has no VmHWM"
        return int(match[1]) * 1024


class Rounds:
    """Exchanges of a node that takes no steps: its parameters are changed by hand before each."""

    def __init__(
        self, owner: Owner, settings: Settings, node: ReplicaNode, results: list[dict[str, object]]
    ) -> None:
        self._owner, self._node, self._results = owner, node, results
        self._chance = torch.Generator().manual_seed(settings.number)
        self._peak = Peak()

    def begin(self, first_round: int) -> None:
        """Set the state so that it begins at `first_round`.

        Tensors are cloned, since zeros that were never written take no memory.
        """
        driver = self._node.loop.driver
        state = {
            name: tensor.clone() for name, tensor in driver.method.snapshot(driver.replica).items()
        }
        driver.method.restore(
            driver.replica, {**state, "round": torch.tensor(first_round)}, "adopt"
        )
        self._node.state_sync.open({"delta": first_round - 1})

    @torch.no_grad()
    def move(self) -> None:
        """Change the parameters as training would, one by one, so that this takes little memory."""
        for parameter in self._node.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=self._chance), alpha=DELTA)

    async def round(self) -> None:
        """Take one step without gradients, then its whole exchange and the outer step."""
        loop = self._node.loop
        self.move()
        self._peak.forget()
        before = self._peak.now_bytes()
        progress = await loop.begin_step()
        loop.driver.method.local_step(loop.driver.replica, progress)
        await loop.end_step(0.0)
        peak = self._peak.highest_bytes()
        assert self._results, "the exchange passed its deadline without a result"
        result = self._results.pop()
        self._owner.say(
            "done", before=before, peak=peak, status=result["status"], peers=result["peers"]
        )


async def main(settings: Settings) -> None:
    """Work until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    owner, codecs = await Owner.open(), Worker("codec")
    plan = plan_of(
        settings.preset,
        1,
        32,
        "diloco",
        period=1,
        codec=settings.codec,
        return_codec=settings.return_codec,
    )
    # SGD has no moments, and skips missing gradients.
    plan = dataclasses.replace(plan, inner=InnerConfig("sgd"))
    results: list[dict[str, object]] = []

    def report(kind: str, fields: dict[str, object]) -> None:
        if kind == "round":
            results.append(fields)

    async with member(owner, settings, codecs) as peer:
        tokens = text_in_memory(ByteTokenizer().encode(TEXT))
        node = replica_node(plan, peer, tokens, compute=codecs, train=codecs, report=report)
        view = await meet(owner, peer, settings, peer.found, peer.join)
        rounds = Rounds(owner, settings, node, results)
        rounds.begin(view.first_round)
        owner.say("ready")
        while True:
            await owner.command("exchange")
            await rounds.round()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
