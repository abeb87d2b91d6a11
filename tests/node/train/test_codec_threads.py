"""The bits of a round do not depend on the threads that encode and decode: all codecs, all
methods."""

import functools

import pytest
import torch

from farflock.compression.catalog import CODECS, codec
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import PRESETS
from farflock.node.run.terms import RunPlan
from farflock.node.simulate import simulation
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.train import shards
from farflock.node.train.shards import DecodedTensors, ShardLayout
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.parts import blocks
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.spread import in_turn, spread_over
from farflock.swarm.sim.network import LinkModel

THREADS = (1, 2, 3)
PEERS = 2
TOKENS = PEERS * 2 * 32 * 14


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Cut a small model into many shards, segments and blocks."""
    monkeypatch.setattr(shards, "SEGMENT_VALUES", 2048)
    monkeypatch.setattr(shards, "SHARD_BYTES", 4096)
    monkeypatch.setattr(blocks, "BLOCK_VALUES", 512)


@pytest.fixture
def spreads():
    torch.set_num_threads(1)
    made = [spread_over(count) for count in THREADS]
    yield made
    for each in made[1:]:
        each.close()


@pytest.fixture(scope="module")
def text():
    return text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:100_000]))


@pytest.mark.parametrize("name", CODECS)
def test_payloads_and_values_are_the_same_with_any_number_of_threads(spreads, name):
    chance = torch.Generator().manual_seed(3)
    shapes = {"a": (150, 64), "b": (4096,), "c": (64, 192), "d": (7,)}
    tensors = {key: torch.randn(shape, generator=chance) for key, shape in shapes.items()}
    layout = ShardLayout.of(shapes, codec(name), 5)
    indices = range(len(layout.shards))

    def encoded(spread):
        return spread(lambda index: layout.encode(index, 7, tensors), indices)

    payloads = encoded(in_turn)
    every = [block for key, shape in shapes.items() for block in blocks.blocks(key, shape)]
    expected = dict(DecodedTensors(layout, 7, payloads, shapes))
    for spread in spreads:
        assert encoded(spread) == payloads
        decoded = DecodedTensors(layout, 7, payloads, shapes)  # read by all threads at once
        values = spread(lambda block, decoded=decoded: decoded.read(*block).clone(), every)
        for block, found in zip(every, values, strict=True):
            assert torch.equal(found, block.of(expected[block.name]))


# One of each kind of exchange and feedback; every codec is in the test before.
KINDS = ("demo", "diloco", "edit", "noloco", "sparseloco")


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in METHODS],
)
def test_a_run_has_the_same_states_with_one_thread_and_with_several(
    monkeypatch, spreads, text, name
):
    trial = METHODS[name].trial
    options = dict(trial.disasters[0].options) if trial.disasters else {}
    inner, schedule = InnerConfig(lr=1e-2), Schedule(1e-2, TOKENS)
    plan = RunPlan(4, PRESETS["tiny"], inner, schedule, name, options, batch=2, seq=32)
    world = simulation.World(PEERS, TOKENS, LinkModel(), view_s=3.0)
    make = simulation.replica_node
    found = []
    for spread in (spreads[0], spreads[-1]):
        spread_node = functools.partial(make, spread=spread)
        monkeypatch.setattr(simulation, "replica_node", spread_node)
        outcome = simulation.simulate(plan, world, text)
        found.append((outcome.state_hash, outcome.rounds, outcome.bytes))
    assert found[0] == found[1]
    assert outcome.rounds or name == "local"
