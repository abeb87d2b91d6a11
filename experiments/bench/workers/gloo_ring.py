"""A yardstick of the sync benchmark: gloo's ring all-reduce of the same bytes, as in DDP on CPUs.

It neither encrypts, verifies nor compresses, and a worker that dies ends all of it.
"""

import asyncio
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from farflock.experiments.bench.workers.member import Place

TIMEOUT = timedelta(seconds=120)


class Ring:
    """One worker's place in the ring; the workers meet at worker 0, at its `port`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # gloo would look the host's name up, and a namespace has none
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if place.host.startswith("127.") else "eth0"
        with socket.create_server((place.host, 0)) as free:
            self.port = int(free.getsockname()[1])

    async def join(self, host: str, port: int) -> None:
        """Connect to the other workers."""
        await asyncio.to_thread(
            dist.init_process_group,
            "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=self._place.number,
            world_size=self._place.count,
            timeout=TIMEOUT,
        )

    async def reduce(self, size_bytes: int) -> None:
        """Sum a tensor of this many bytes over all workers.

        Each of N workers sends (N-1)/N of them twice."""
        values = torch.ones(size_bytes // 4)
        await asyncio.to_thread(dist.all_reduce, values)
        assert values[-1] == self._place.count, "the ring did not sum all workers' tensors"
