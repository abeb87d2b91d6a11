"""One stage server and its callers, in virtual time."""

import asyncio
import contextlib

import torch

from farflock.compression.activation_catalog import activation_codec
from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.contrib.kept_versions import Versions
from farflock.node.pipeline.lifecycle.features import edge_ends
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Done,
    Forward,
    Merged,
    decode_answer,
    encode,
)
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.server import StageServer
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.run.split import even
from farflock.node.run.terms import Asynchronous, ServerTerms
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=3, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
SPANS = even(MODEL, 3)
LIFE, EPOCH, TOKENS = 77, 5, 8
PASS_S = 0.5


class Bench:
    """A server of one of three stages in fp64 and on the CPU, or of this type and on this device,
    and the messages sent to it.

    A forward pass takes half a virtual second.
    """

    def __init__(
        self,
        index=1,
        codec="raw",
        versions=None,
        others=(),
        dtype=torch.float64,
        device=None,
        **terms,
    ):
        self.marks = {}
        self.stage = Stage(
            build(MODEL, 3, SPANS[index]).to((device or Device()).place, dtype), device
        )
        size = 1, TOKENS, MODEL.dim, MODEL.vocab_size
        others = tuple(map(activation_codec, others))
        self.edges = Edges(activation_codec(codec), *size, 9, dtype, others)
        self.index, self.applied, self.passes = index, EPOCH, []
        self.terms = ServerTerms(**{"lease_s": 20.0, **terms})
        self.versions = (
            self.versioned(versions, self.terms.staleness) if versions else WeightVersions()
        )
        self.server = self.made()

    def made(self):
        return StageServer(
            self.index,
            self.stage,
            edge_ends(self.edges),
            self.terms,
            self,
            life=LIFE,
            applied=lambda: self.applied,
            versions=self.versions,
        )

    def versioned(self, keep, bound):
        inner = torch.optim.SGD(self.stage.model.parameters(), 0.1)
        return Versions(
            self.stage.model,
            inner,
            Asynchronous(keep),
            bound,
            lambda: self.applied,
            lambda: self.marks,
        )

    def apply_round(self, noted=b""):
        """Apply a round, which changes the weights."""
        self.server.accounts.closing(self.applied + 1, noted)
        with torch.no_grad():
            for parameter in self.stage.model.parameters():
                parameter.add_(0.01)
        self.applied += 1
        self.server.accounts.closed(self.applied, noted)
        self.server.accounts.absorb()

    async def compute(self, work):
        return work()

    async def run_pass(self, work, cost):
        self.passes.append(cost)
        await asyncio.sleep(PASS_S * cost)
        return work()

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.server.run())
        yield self
        assert not task.done(), "the server died"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # what a trainer has of a microbatch

    def tokens(self, number):
        return torch.randint(
            0, MODEL.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(number)
        )

    def values(self, number, salt):
        generator = torch.Generator().manual_seed(1000 * number + salt)
        return torch.randn(1, TOKENS, MODEL.dim, generator=generator, dtype=self.edges.dtype)

    def inside(self, number):
        return self.tokens(number) if self.stage.is_first else self.values(number, 1)

    def outside(self, number):
        return self.tokens(number + 500) if self.stage.is_last else self.values(number, 2)

    def forward(self, number, **changes):
        request = Forward(number, self.index, self.index - 1, EPOCH)
        payloads = [self.edges.pack(self.tokens(number))]
        if not self.stage.is_first:
            payloads.append(bytes_of(self.values(number, 1)))
        return changed(request, changes), payloads

    def backward(self, number, attempt=1, **changes):
        outside = self.outside(number)
        last = self.edges.pack(outside) if self.stage.is_last else bytes_of(outside)
        request = Backward(number, self.index, self.index - 1, EPOCH, attempt)
        return changed(request, changes), [*self.forward(number)[1], last]

    # asking

    def admit(self, request, payloads=(), caller="t"):
        refusal = self.server.admit(caller, encode(request), tuple(map(len, payloads)))
        return None if refusal is None else decode_answer(refusal)

    async def ask(self, request, payloads=(), caller="t"):
        refusal = self.admit(request, payloads, caller)
        if refusal is not None:
            return refusal, ()
        reply = await self.server.serve(caller, encode(request), tuple(payloads))
        return decode_answer(reply.body), reply.payloads

    async def say(self, request, caller="t"):
        return (await self.ask(request, caller=caller))[0]

    async def put_aside(self, number, attempt=1, caller="t"):
        answer, payloads = await self.ask(*self.backward(number, attempt), caller=caller)
        assert isinstance(answer, Done)
        return answer, payloads

    async def merge(self, number, attempt=1, caller="t"):
        await self.put_aside(number, attempt, caller)
        assert await self.say(Confirm(number, self.index, attempt), caller) == Merged()


def bytes_of(x):
    return x.numpy().tobytes()


def changed(request, changes):
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return type(request)(**{**fields, **changes})


def served(index=1, **options):
    """Run a test `main(bench)` next to a running server in virtual time."""

    def decorate(main):
        def test():
            async def whole():
                async with Bench(index, **options).running() as bench:
                    await main(bench)

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate
