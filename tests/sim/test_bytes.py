"""The bytes that each method states, against the counter of the transport: nothing else is sent.

Formulas are those of a round of the whole group, from the number of values and the codec (written
out here once more): each of M peers' contributions to a mean goes to its reducer,
and the result to all but that one; what is gathered goes from each to each; a pair swaps.
Beside that there may be control messages, whose size does not depend on the model's.
"""

import asyncio
import collections
import itertools
import math

import pytest
import torch
from worlds.waiting import until

from farflock.compression.catalog import codec
from farflock.node.simulate.chaos import Chaos
from farflock.node.simulate.chaos_methods import ChaosCase, CountingReplica
from farflock.node.simulate.population import Population
from farflock.node.train import shards as wire
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.decoupled import CHECK
from farflock.optimizers.method import RandomGroups
from farflock.optimizers.trial_options import disasters_of
from farflock.swarm.chunk_server import PIECE_BYTES
from farflock.swarm.frame import unpack
from farflock.swarm.messages import Offer, PairAccept, PairPropose, Piece
from farflock.swarm.peer.peer import STORE_BYTES
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

PEERS = 4
SEGMENT_VALUES = 16 * 4096  # less than usual, so that there are two shards of few values
SIZES = {"a": 16 * 4096, "b": 8 * 4096}
A, B, P = SIZES["a"], SIZES["b"], sum(SIZES.values())
LENGTH = 4  # before each tensor, or part of one, in a shard
FRAME = 28  # head and checksum of a frame
PIECE = FRAME + 60  # ... with the name of the chunk, and where in it the piece belongs
ITEM = 60  # in a close list, for each shard of each peer: a digest, the members in it, its size
# any other message: at most a close list with three shards of each peer
CONTROL = FRAME + 160 + ITEM * 3 * PEERS
# Of these for each two peers in a round: offers, wants, holdings and votes, each sent again every
# half second.
MESSAGES = 40
WINDOW_S = 8.0
IDLE = 40  # ... and in the rest of the time: pings, and which peers are there


def coded(codec, count):
    """Return the bytes of `count` values in a codec."""
    match codec:
        case "fp32":
            return 4 * count
        case "fp16" | "bf16":
            return 2 * count
        case "int8":
            return count + 4 * math.ceil(count / 256)
        case "topk:32/4096":
            return count // 4096 * (32 * (12 + 8) // 8 + 4)
    raise ValueError(codec)


def payload(codec, *counts):
    """Return the bytes of tensors with these numbers of values."""
    return sum(LENGTH + coded(codec, count) for count in counts)


def mean(out, back, *counts):
    return (PEERS - 1) * (payload(out, *counts) + payload(back, *counts))


def gather(out, *counts):
    """The shards are so few that each is a bundle, which has no list."""
    return PEERS * (PEERS - 1) * payload(out, *counts)


def pairs(out, *counts):
    return PEERS * payload(out, *counts)


H3 = {"period": 3}
OUT = {"codec": "fp16", "return_codec": "bf16"}
# By method: options, and bytes of one round of each stream. A method that is not here sends what
# its own specimens say.
FORMULAS = {
    "local": ({}, {}),
    "ddp": (OUT, {"grad": mean("fp16", "bf16", A, B)}),
    "diloco": ({**H3, "codec": "int8"}, {"delta": mean("int8", "bf16", A, B)}),
    "noloco": ({**H3, "codec": "fp16"}, {"pairs": pairs("fp16", A, B)}),
    "sparseloco": ({**H3, "codec": "topk:32/4096"}, {"sparse": gather("topk:32/4096", A, B)}),
    "demo": (
        {**H3, "check_rounds": 2},
        {"dct": gather("topk:32/4096", A, B), "check": gather("fp32", 64)},
    ),
    "flexdemo": (
        {**H3, "rate": 1 / 4, "codec": "bf16", "check_rounds": 2},
        {"part": mean("bf16", "bf16", P // 4), "check": gather("fp32", 64)},
    ),
    "streaming": (
        {"period": 4, "fragments": 2, "codec": "int8"},
        {"fragment.0": mean("int8", "bf16", A), "fragment.1": mean("int8", "bf16", B)},
    ),
    "delayed": ({**H3, **OUT}, {"delta": mean("fp16", "bf16", A, B)}),
    "co2": ({**H3, **OUT}, {"average": mean("fp16", "bf16", A, B)}),
    "desloc": (
        {"period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 6, "moment_codec": "bf16", **OUT},
        {
            "param": mean("fp16", "bf16", A, B),
            "exp_avg": mean("bf16", "bf16", A, B),
            "exp_avg_sq": mean("bf16", "bf16", A, B),
        },
    ),
    "sparta": (
        {**H3, "one_in": 8, "codec": "fp16", "return_codec": "fp16"},
        {"mask": mean("fp16", "fp16", P // 8)},
    ),
    "sparta-diloco": (
        {"period": 6, "mask_period": 3, "one_in": 8, "mask_codec": "fp16", **OUT},
        {"mask": mean("fp16", "fp16", P // 8), "delta": mean("fp16", "bf16", A, B)},
    ),
    "edit": (
        {**H3, **OUT, "temperature": None, "threshold": None},
        {"norms": gather("fp32", 2, 1), "delta": mean("fp16", "bf16", A, B)},
    ),
    "async": ({**H3, "enough": 0, "codec": "int8"}, {"arrivals": gather("int8", 1, 1, A, B)}),
    "lean": ({**H3, **OUT}, {"lean": mean("fp16", "bf16", A, B)}),
}


class Busy(CountingReplica):
    """Every value of every peer moves in each step in another way: no two chunks are equal,
    so none is sent only once."""

    def add_gradient(self, step):
        own = torch.Generator().manual_seed(1000 * self._place + step)
        for grad in self._tensors["grad"].values():
            grad += torch.randn(len(grad), generator=own)


class Large(ChaosCase):
    """An arm that trains many values."""

    def replica(self, place):
        return Busy(place, SIZES, moments=self.method == "desloc")


class Unequal(Population):
    """Peers that train while `going` is set, each at another pace."""

    going = None

    def _trainer(self, index):
        """Each step of each peer takes another time, for speeds are sent too."""
        steps = itertools.count(PEERS)

        async def train(work):
            loss = work()
            await asyncio.sleep(self._arm.step_s * (1 + index / 47 + next(steps) ** 2 / 5003))
            await self.going.wait()
            return loss

        return train


class Counted(Chaos):
    """A run without faults, of which the tap counts what is sent while it is told to."""

    def __init__(self, arm):
        super().__init__(1, arm, PEERS)
        self.network = SimNetwork(1, LinkModel())
        self.network.tap = self._tapped
        self.population = Unequal(1, arm, self.network, self.watch, self.population.identities)
        self.population.peers.store_bytes = STORE_BYTES
        self.going = self.population.going = asyncio.Event()
        self.rounds, self.pieces, self.others, self.bodies = set(), [], collections.Counter(), 0

    def _tapped(self, now_s, sender, receiver, frame):
        said = unpack(frame)
        match said.message:
            case Piece():
                self.pieces.append(len(frame) - len(said.body))
                self.bodies += len(said.body)
            case (
                Offer(key=key)
                | PairPropose(offer=Offer(key=key))
                | PairAccept(offer=Offer(key=key))
            ):
                self.rounds.add((key.stream, key.round))
        if not isinstance(said.message, Piece):
            self.others[len(frame)] += 1
        return frame

    async def still(self):
        """Stop all training at a moment when nothing is in flight, and wait until every message is
        delivered."""
        lives = self.population.lives
        await until(
            lambda: all(
                task.done() for life in lives.values() for task in life.loop.under_way.values()
            ),
            every_s=0.01,
        )
        self.going.clear()
        await asyncio.sleep(3.0)

    async def run(self):
        self.going.set()
        for index in range(PEERS):
            self.population.begin(index)
        await self.progress(3, "the start")
        await self.still()
        self.rounds, self.pieces, self.others, self.bodies = set(), [], collections.Counter(), 0
        before = self.network.bytes["sent"]
        self.going.set()
        await asyncio.sleep(WINDOW_S)
        await self.still()
        await self.population.end_all()  # within which the last tick of some peers may fall
        return self.network.bytes["sent"] - before


def specimens_formula(options, streams):
    """Options, and bytes of one round of each stream, from what a method says of its streams."""
    sent = {
        "mean": lambda one, *counts: mean(one.codec, one.return_codec, *counts),
        "gather": lambda one, *counts: gather(one.codec, *counts),
    }
    formula = {}
    for one in streams:
        counts = [x.numel() for x in one.tensors.values()]
        paired = isinstance(one.group, RandomGroups)
        formula[one.key.stream] = (
            pairs(one.codec, *counts) if paired else sent[one.kind](one, *counts)
        )
    return options, formula


@pytest.mark.parametrize("name", FORMULAS)
def test_specimens_say_what_the_formula_says(name):
    options, formula = FORMULAS[name]
    assert specimens_formula(options, Large(name, options).streams()) == (options, formula)


def formula_of(name):
    if name in FORMULAS:
        return FORMULAS[name]
    options = disasters_of(METHODS[name])[0].options
    return specimens_formula(options, Large(name, options).streams())


def shard_bytes(stream):
    """The room of a shard that the first tensor fills; the rest, with small ones, has another."""
    codecs = [stream.codec] + [stream.return_codec] * (stream.kind == "mean")
    return max(codec(name).max_bytes(A) for name in codecs)


@pytest.mark.parametrize("name", METHODS)
def test_the_transport_counts_the_formulas_bytes_and_a_bounded_control_traffic(monkeypatch, name):
    options, formula = formula_of(name)
    streams = Large(name, options).streams()
    monkeypatch.setattr(wire, "SEGMENT_VALUES", SEGMENT_VALUES)
    large = [one for one in streams if sum(x.numel() for x in one.tensors.values()) > A // 16]
    monkeypatch.setattr(wire, "SHARD_BYTES", max(map(shard_bytes, large), default=0))

    async def whole():
        run = Counted(Large(name, options))
        return run, await run.run()

    run, counted = run_virtual(whole())
    assert {stream for stream, _ in run.rounds} == formula.keys()
    content = sum(formula[stream] for stream, _ in run.rounds)
    sketches = sum(formula[stream] for stream, _ in run.rounds if stream == CHECK)
    # Peers that agree have equal sketches, and a peer that has one needs no other.
    assert content - sketches <= run.bodies <= content
    assert run.bodies == content or sketches
    assert all(overhead <= PIECE for overhead in run.pieces)
    assert len(run.pieces) <= math.ceil(content / PIECE_BYTES) + 3 * PEERS * PEERS * len(run.rounds)
    assert max(run.others) <= CONTROL
    links = PEERS * (PEERS - 1)
    assert run.others.total() <= links * (MESSAGES * len(run.rounds) + IDLE)
    assert counted == run.bodies + sum(run.pieces) + sum(
        size * count for size, count in run.others.items()
    )
