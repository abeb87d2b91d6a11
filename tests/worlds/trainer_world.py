"""A trainer among scripted servers, in virtual time."""

import asyncio
import collections
import itertools
import struct

import torch

from farflock.compression.activation_catalog import activation_codec
from farflock.node.pipeline.contrib.sample_inputs import SampleInputs
from farflock.node.pipeline.contrib.sample_memory import NotHeld, ServerMemory
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Done,
    Forward,
    HeldOutForward,
    Lacks,
    Merged,
    Revoke,
    Unknown,
    decode_request,
    encode,
)
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource, WholeInputs
from farflock.node.pipeline.trainer.stage_directory import ServerLife
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.run.terms import TrainerTerms
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.peer.call_server import CallReply
from farflock.swarm.peer.calls import CallFailed
from farflock.swarm.peer.payloads import Left
from farflock.swarm.sim.virtual_time import run_virtual

STAGES, TOKENS, EPOCH, LIFE = 3, 4, 6, 1
CALL_S = 0.05


class Asked(collections.namedtuple("Asked", "peer request payloads")):
    """One request as it reached a server."""

    def __repr__(self):
        return f"{type(self.request).__name__.lower()} {self.peer}"


class Order(dict):
    """The servers of each stage."""

    @property
    def stages(self):
        return {stage: [Announced(peer, LIFE) for peer in peers] for stage, peers in self.items()}


class World:
    """Two servers of each stage, `0a` and `0b` and so on, that do what they are asked unless a
    script says otherwise; and all that a trainer reads of the swarm."""

    me = "t"
    view_number = 7
    stages = STAGES

    def __init__(self, codec="raw", others=(), gone=None, allowance=None, **terms):
        self.calls = self.codec_offers = self
        self.reads = {}  # by server, what it has said that it reads
        self.epoch, self.log, self.scripts = EPOCH, [], collections.defaultdict(list)
        self.order = Order({stage: [f"{stage}a", f"{stage}b"] for stage in range(STAGES)})
        self.closed, self.gone, self.doubtful, self.left_out = [], [], [], []
        self.results, self.events, self.under_way = [], [], collections.Counter()
        self.most = collections.Counter()
        self.stays = False  # whether payloads stay with the servers that made them
        self.here, self.numbers = {}, itertools.count()
        self.leaves, self.fetched, self.lost = [], [], set()
        others = tuple(map(activation_codec, others))
        self.edges = edges = Edges(activation_codec(codec), 1, TOKENS, 2, 16, 0, others=others)
        self.memories = collections.defaultdict(lambda: ServerMemory(edges))
        usual = {"window": 1, "kept": 1, "forward_timeout_s": 4.0, "backward_timeout_s": 6.0}
        terms = TrainerTerms(**{**usual, **terms})
        source = MicrobatchSource(self, edges, self, gone=gone)
        inputs = SampleInputs(edges, self) if edges.remembers else WholeInputs()
        self.trainer = Trainer(self, self, self, source, terms, self.report, inputs, allowance)

    def of(self, peer, life):
        assert life == LIFE
        return self.reads.get(peer)

    def batch(self, number):
        return torch.full((1, TOKENS), number % 16), torch.full((1, TOKENS), (number + 1) % 16)

    def samples(self, number):
        return (number % 2,)

    def report(self, kind, fields):
        self.events.append((kind, fields["number"]))

    # the rolls

    def tokens(self):
        return 0

    def serving(self):
        return self.order

    def at(self, stage, peer):
        return ServerLife(peer, LIFE)

    def server(self, name):
        peer = name.partition("/")[0]
        return ServerLife(peer, LIFE) if peer in self.order[int(peer[0])] else None

    def named(self):
        closed, self.closed = self.closed, []
        yield from closed

    def left(self):
        gone, self.gone = self.gone, []
        yield from gone

    def skipped(self):
        return self.doubtful.pop() if self.doubtful else None

    # The policy: ask the first in line; a server that fails goes to the end of the line.

    def stage_order(self, microbatch):
        return tuple(range(STAGES))

    def next_hop(self, microbatch, stage, serving, now_s, size, exclude=()):
        return next((peer for peer in serving[stage] if peer not in exclude), None)

    def on_result(self, call, outcome, now_s):
        self.results.append((call.peer, outcome, call.size))
        line = self.order[call.stage]
        if outcome != "done" and call.peer in line:
            line.append(line.pop(line.index(call.peer)))

    # the servers

    async def ask(self, peer, raw, payloads, *, timeout_s, max_reply_bytes, leave=False):
        request = decode_request(raw)
        self.log.append(Asked(peer, request, tuple(payloads)))
        self.leaves.append(leave)
        place = (request.number, request.stage)
        self.under_way[place] += 1
        self.most["calls"] = max(self.most["calls"], self.under_way.total())
        try:
            await asyncio.sleep(CALL_S)
            script = self.scripts[peer, type(request)]
            done = script.pop(0) if script else honest
            if self.edges.remembers and done is honest and isinstance(request, Forward | Backward):
                reply = self.remembering(peer, request, payloads)
            else:
                reply = done(request)
            if reply is None:
                await asyncio.sleep(timeout_s)
                raise CallFailed("deadline", "silence")
            return CallReply(*(self.leaving(peer, *reply) if self.stays and leave else reply))
        finally:
            self.under_way[place] -= 1

    def leaving(self, peer, body, payloads=()):
        """Leave the payloads of a reply with the server that made them."""
        lefts = []
        for payload in payloads:
            lefts.append(Left(((digest_of(payload), len(payload)),), (peer,), next(self.numbers)))
            self.here[lefts[-1].call] = payload
        return body, (), tuple(lefts)

    async def fetch(self, left, timeout_s):
        await asyncio.sleep(CALL_S)
        self.fetched.append(left)
        return None if left.call in self.lost else self.here.get(left.call)

    def drop(self, left):
        self.here.pop(left.call, None)

    def remembering(self, peer, request, payloads):
        """Answer as a server with a codec that remembers samples; a stage's output is its input
        plus one."""
        memory, x = self.memories[peer], torch.zeros(1, TOKENS, 2)
        try:
            x = memory.input(self.me, payloads[1], request) if request.stage else x
        except NotHeld as lacking:
            return (encode(Lacks(lacking.rows)),)
        if isinstance(request, Backward):
            return honest(request)
        return encode(Done(LIFE)), (memory.output(self.me, x + 1 + request.number / 16, request),)

    def script(self, peer, kind, *steps):
        """Answer the next requests of this kind to this server like this, and later ones as
        usual."""
        self.scripts[peer, kind] += steps

    # watching

    async def until(self, condition, within_s=60.0):
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.05)

    def asked(self, *kinds, stage=None):
        return [
            entry
            for entry in self.log
            if isinstance(entry.request, kinds) and (stage is None or entry.request.stage == stage)
        ]

    async def merged(self, count=STAGES):
        """Wait until `count` confirmations were answered."""
        await self.until(lambda: len(self.asked(Confirm)) >= count)
        await asyncio.sleep(2 * CALL_S)

    async def close(self, *numbers, stages=range(STAGES)):
        """Close rounds of these stages that name these microbatches."""
        self.closed += [(stage, [(self.me, number) for number in numbers]) for stage in stages]
        await asyncio.sleep(0.3)


def honest(request):
    match request:
        case Forward():
            return encode(Done(LIFE)), (b"out of %d" % request.stage,)
        case HeldOutForward():
            losses = struct.pack("<d", 2.0 + request.number)
            is_last = request.stage == STAGES - 1
            return encode(Done(LIFE)), (losses if is_last else b"out of %d" % request.stage,)
        case Backward():
            loss = 8.0 if request.stage == STAGES - 1 else None
            gradient = (b"gradient of %d" % request.stage,) if request.stage else ()
            return encode(Done(LIFE, request.attempt, 0.1, loss)), gradient
        case Confirm():
            return (encode(Merged()),)
        case Revoke():
            return (encode(Unknown()),)


def saying(answer, *payloads):
    return lambda request: (encode(answer), payloads)


def silence(request):
    return None


def trained(**terms):
    """Run a test `main(world)` in virtual time while its trainer runs."""

    def decorate(main):
        def test():
            async def whole():
                world = World(**terms)
                task = asyncio.create_task(world.trainer.run(lambda: False))
                try:
                    await main(world)
                finally:
                    world.trainer.stopping = True
                    await task
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


def stages_of(entries):
    return [entry.request.stage for entry in entries]
