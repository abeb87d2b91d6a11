"""`SwarmOptimizer`s without threads: the loop turns, in virtual time, while their program waits.

Of several peers, each program is a coroutine."""

import asyncio
from dataclasses import dataclass, field

import torch
from torch import nn

from farflock.node.library.averaged_buffers import averaged_buffers
from farflock.node.library.background import stopped
from farflock.node.library.last_round import OwnSteps
from farflock.node.library.local_swarm import QUICK, LocalPeers
from farflock.node.library.presence import ExternalStep, JoinRequest, OptimizerNode
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.model.replica import PlainReplica
from farflock.node.run.fit import SHARED_MOMENTS
from farflock.node.run.tensor_list import encode, list_tensors
from farflock.node.run.user_terms import fingerprint, wish
from farflock.optimizers.parts.portable_inner import make_portable
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import VirtualLoop, run_virtual

from .waiting import until


def model_of(rank):
    """A small model, the same in every rank."""
    model = nn.Linear(8, 1)
    with torch.no_grad():
        model.weight.fill_(0.25)
        model.bias.fill_(0.0)
    return model


class VirtualContext:
    """What `BackgroundContext` is, in the program's own thread."""

    def __init__(self, context):
        self._loop, self._leave = VirtualLoop(0.0), asyncio.Event()
        self._entered = self._loop.create_future()
        self._life = self._loop.create_task(self._live(context))
        self._turn(asyncio.wait((self._entered, self._life), return_when="FIRST_COMPLETED"))
        if self._life.done():
            self._loop.close()
            self._life.result()

    @property
    def value(self):
        return self._entered.result()

    @property
    def ended(self):
        return self._life.done()

    def call(self, work, *, through=False):
        if self.ended:
            raise stopped(None)
        return self._turn(work())

    def end(self):
        if not self.ended:
            self._leave.set()
            self._turn(self._life)
            self._loop.close()

    async def _live(self, context):
        async with context() as value:
            self._entered.set_result(value)
            await self._leave.wait()

    def _turn(self, work):
        return self._loop.run_until_complete(work)


class LoneDoor:
    """The entry point of a peer without others, over links in memory."""

    def enter(self, join_request):
        peers = LocalPeers(1, 0, QUICK, inline)
        life = VirtualContext(lambda: peers.inside(0, join_request))
        return life, life.end


def alone(model, method="diloco", **options):
    """Return the optimizer of a peer alone."""
    return SwarmOptimizer(model, method, LoneDoor(), **options)


@dataclass
class Member:
    """One program: its model, its part in the run, and what that has reported."""

    rank: int
    model: nn.Module
    inner: torch.optim.Optimizer
    task: ExternalStep
    here: OptimizerNode
    reports: list = field(default_factory=list)
    own: OwnSteps = field(default_factory=OwnSteps)

    def __post_init__(self):
        self.here.loop.counted = self.own.counted

    @property
    def rounds(self):
        return [fields for kind, fields in self.reports if kind == "round"]

    async def step(self, loss_of):
        """Make a step on the loss of the model, as `SwarmOptimizer.step` does."""
        loop = self.here.loop
        self.inner.zero_grad()
        loss_of(self.model).backward()
        loss = loop.train_one(await loop.begin_step())
        self.own.stepped(loop.step + 1, loop.client.members())
        await loop.end_step(loss)


def train_together(count, method, model_of, work, inner_of, **options):
    """Return `await work(member)` of each rank, in order; rank 0 starts the run."""
    peers, everybody = LocalPeers(count, 0, QUICK, inline), asyncio.Barrier(count)

    async def live(rank):
        model, reports = model_of(rank), []
        inner = inner_of(model.parameters())
        buffers = averaged_buffers(model, options.get("buffers"))
        averaged = buffers and buffers.agreed
        listed = list_tensors(model, with_frozen=options.get("frozen") is None, buffers=averaged)
        print_ = fingerprint(model, inner, listed)
        wished = wish(print_, method, {"name": None, "seed": 0}, options)
        if method in SHARED_MOMENTS:
            make_portable(inner)
        task, replica = ExternalStep(), PlainReplica(model, inner, None)
        request = JoinRequest(
            wished,
            replica,
            task,
            lambda kind, fields: reports.append((kind, fields)),
            encode(listed),
            buffers,
        )
        async with peers.inside(rank, request) as here:
            views = here.peer.context.views
            await until(lambda: len(views.newest.members) == count)
            await everybody.wait()
            return await work(Member(rank, model, inner, task, here, reports))

    async def all_lives():
        return await asyncio.gather(*map(live, range(count)))

    return run_virtual(all_lives())
