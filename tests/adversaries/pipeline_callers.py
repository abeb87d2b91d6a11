"""Hostile callers of stage servers, made of the product's own parts, in simulated pipelines.

They know the run, a member's record and all codecs, and send well-formed requests with payloads of
their own choice.
"""

import asyncio
import collections
import contextlib
import hashlib
import itertools

import torch
from worlds.waiting import until

from farflock.node.pipeline.passes.edges import edges_of
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Done,
    decode_answer,
    encode,
)
from farflock.node.simulate.pipeline import identity_of
from farflock.swarm.identity import Identity
from farflock.swarm.peer.calls.calls import CallFailed
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.record import Record, seal
from farflock.swarm.roles import NOTHING, role_of
from farflock.swarm.sim.tickets import ticket_of

CALL_S = 5.0  # for one answer
MEET_S = 60.0
LIFE = 10**6  # of a hostile peer: no other peer's


class HostileCaller:
    """A peer that asks every server of a stage for backward passes, `at_once` of them each.

    `answers` counts the types of answers, and the reasons of failed calls."""

    def __init__(self, audit, stage, at_once=4, scale=1.0, name="hostile"):
        self.audit, self.sim, self.stage = audit, audit.sim, stage
        self.at_once, self.scale = at_once, scale
        self.edges = edges_of(audit.plan, audit.pipeline)
        self.answers, self._numbers = collections.Counter(), itertools.count()
        self._chance = torch.Generator().manual_seed(7)
        run, seed = str(audit.plan.run_seed), audit.plan.run_seed
        identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        self.me, role = identity.peer, role_of(NOTHING)
        record = seal(identity, Record(run, self.me, LIFE, LIFE, curve=bytes(32), role=role))
        links = self.sim.network.links(self.me)
        founder = identity_of(audit.plan, 0)
        terms = RunTerms(run, seed, founder.peer, audit.world.view_s)
        self.peer = Peer(terms, identity, links, None, incarnation=LIFE, record=lambda: record)
        self.peer.membership.bring(ticket_of(founder, run))

    @contextlib.asynccontextmanager
    async def attacking(self):
        """Attack while the block runs."""
        async with self.peer.running():
            await self.enter([node.peer.membership.book.mine for node in self.sim.nodes.values()])
            servers = [
                node.peer.me
                for node in self.sim.nodes.values()
                if self.stage in {serving.index for serving in node.servings}
            ]
            asking = [
                asyncio.create_task(self.ask_on(server))
                for server in servers
                for _ in range(self.at_once)
            ]
            try:
                yield self
            finally:
                for task in asking:
                    task.cancel()
                for end in await asyncio.gather(*asking, return_exceptions=True):
                    assert isinstance(end, asyncio.CancelledError), end

    async def enter(self, records):
        """Learn the run's views, and no more than that."""
        await self.peer.meet(records, MEET_S)

    async def ask_on(self, server):
        """Ask one server for backward passes, one after the other."""
        while True:
            number = next(self._numbers)
            source = self.stage - 1
            request = Backward(number, self.stage, source, self.sim_epoch(), 1)
            answer = await self.ask(server, request, self.payloads())
            if isinstance(answer, Done):
                await self.got(server, number)
            else:
                await asyncio.sleep(0.1)

    async def got(self, server, number):
        """Confirm a gradient, so that it counts."""
        await self.ask(server, Confirm(number, self.stage, 1))

    async def ask(self, server, request, payloads=()):
        """Make one call; return the answer, or None."""
        limits = {"timeout_s": CALL_S, "max_reply_bytes": 2**20}
        try:
            reply = await self.peer.calls.ask(server, encode(request), payloads, **limits)
        except CallFailed as error:
            self.answers[type(error).__name__] += 1
            return None
        answer = decode_answer(reply.body)
        self.answers[type(answer).__name__] += 1
        return answer

    def sim_epoch(self):
        return max(node.stage_directory.epoch for node in self.sim.nodes.values())

    def payloads(self):
        """Return tokens, a random input and, at the last stage, targets of this peer's own choice;
        elsewhere a random gradient times `scale`."""
        plan, last = self.audit.plan, self.stage == len(self.audit.pipeline.stages) - 1
        tokens = torch.randint(
            0, plan.model.vocab_size, (plan.batch, plan.seq), generator=self._chance
        )
        given = [self.edges.pack(tokens)]
        if self.stage:
            given.append(self._random())
        targets = torch.ones_like(tokens)
        return [*given, self.edges.pack(targets) if last else self._random(self.scale)]

    def _random(self, scale=1.0):
        plan = self.audit.plan
        size = plan.batch, plan.seq, plan.model.dim
        x = scale * torch.randn(*size, generator=self._chance, dtype=plan.dtype)
        return x.numpy().tobytes()  # the codec is "raw"


class Stranger(HostileCaller):
    """A peer that is in no view, and confirms whatever it gets."""


class NeverConfirms(HostileCaller):
    """A member that asks for ever more backward passes, and confirms none."""

    async def enter(self, records):
        """Become a member, as a trainer does."""
        await self.peer.join(records, MEET_S)
        await until(lambda: self.peer.membership.is_member)

    async def got(self, server, number):
        """Leave the gradient where it is."""
