"""A worker of the sync benchmark's yardstick `hivemind`: its averager, with its own processes.

Matchmaking is over before the barrier: what is timed is the all-reduce alone. hivemind forks, so
that each averager has a worker of its own.
`python -m farflock.experiments.bench.workers.averager_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import os
import sys
from typing import Any

import msgspec
import psutil
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from hivemind.dht import DHT
from hivemind.utils import get_dht_time

from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import Place
from farflock.experiments.measure.parent import end_with_parent

CODECS = {"fp16": Float16Compression, "fp32": NoCompression}
TENSOR_VALUES = 1_000_000
MATCH_S = 3.0  # for a group to form, if it is not full before
STEP_TIMEOUT_S = 45.0
POLL_S = 0.02


class Settings(Place, frozen=True):
    """The owner's settings: the number of parameters and the codec."""

    parameters: int
    codec: str


def cpu_s() -> float:
    """Return the computing time of this process and of all that it has started."""
    times = [
        each.cpu_times() for each in (psutil.Process(), *psutil.Process().children(recursive=True))
    ]
    return float(sum(each.user + each.system for each in times))


def averager(settings: Settings, dht: DHT) -> DecentralizedAverager:
    """Return a running averager of all workers' tensors."""
    starts = range(0, settings.parameters, TENSOR_VALUES)
    counts = [min(TENSOR_VALUES, settings.parameters - start) for start in starts]
    return DecentralizedAverager(
        [torch.zeros(count) for count in counts],
        dht,
        start=True,
        prefix="bench",
        target_group_size=settings.count,
        min_group_size=settings.count,
        min_matchmaking_time=MATCH_S,
        request_timeout=MATCH_S / 2,
        compression=CODECS[settings.codec](),
        declare_state_period=3600,
    )


async def matched(mine: DecentralizedAverager) -> Any:  # noqa: ANN401 - hivemind is untyped
    """Return a step whose group has formed, and which waits for its trigger."""
    step = mine.step(
        scheduled_time=get_dht_time() + MATCH_S,
        timeout=STEP_TIMEOUT_S,
        require_trigger=True,
        wait=False,
    )
    async with asyncio.timeout(STEP_TIMEOUT_S):
        # A step tells its stage through shared memory alone.
        while step.stage is not AveragingStage.AWAITING_TRIGGER:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    return step


async def average(owner: Owner, settings: Settings, mine: DecentralizedAverager) -> None:
    """Average once, starting at the barrier."""
    with mine.get_tensors() as tensors:
        for tensor in tensors:
            tensor.fill_(settings.number)
    step = await matched(mine)
    await owner.barrier()
    begun_s = cpu_s()
    step.allow_allreduce()
    group = await asyncio.to_thread(step.result)
    done_s = asyncio.get_running_loop().time()
    with mine.get_tensors() as tensors:
        whole = all(abs(float(x[-1]) - (settings.count - 1) / 2) < 0.01 for x in tensors)
    members = len(group) if whole else 0
    owner.say("done", done_s=done_s, cpu_s=cpu_s() - begun_s, members=members)


def joined(settings: Settings, doors: list[str]) -> DHT:
    """Return a running node of hivemind's table; it listens on this worker's host alone."""
    return DHT(
        initial_peers=doors,
        start=True,
        host_maddrs=[f"/ip4/{settings.host}/tcp/0"],
        nat_port_map=False,
        use_relay=False,
    )


async def main(settings: Settings) -> None:
    """Work until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=end_with_parent)
    owner = await Owner.open()
    dht = joined(settings, (await owner.command("join"))["doors"])
    mine = averager(settings, dht)
    owner.say("joined", doors=[str(address) for address in dht.get_visible_maddrs()])
    while True:
        await owner.command("average")
        await average(owner, settings, mine)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
