"""Nodes whose outer state is on the device that trains, worlds/card.py or a real one: only payloads
travel, and what peers agree on does not depend on where it is kept."""

import math

import pytest
import torch
from worlds.card import CARD, is_on_device

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.model.replica import PlainReplica
from farflock.node.state import checkpoint
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

TOKENS = 640
PERIOD = 5
OPTIONS = {
    "diloco": {"period": PERIOD, "codec": "int8", "feedback": 0.9},
    "sparseloco": {"period": PERIOD, "codec": "topk:8/512"},
    "ddp": {"codec": "bf16"},
    "lean": {"period": PERIOD},
}
PAYLOAD_SHARE = 0.6  # of the weights: bf16 and its frame, the widest payload here, each way
HASHED = 2  # states: phi and momentum


def method_state(node):
    """The state that members share, on the CPU."""
    held = checkpoint_state(node)[0]["method"]
    return {name: x.cpu().clone() for name, x in held.items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


@pytest.mark.ci_more
@pytest.mark.parametrize("method", OPTIONS)
def test_wherever_outer_state_is_a_run_has_the_same_bits(bench, text, single, method):
    made = bench(text, method, total=TOKENS, **OPTIONS[method])
    states = [method_state(made.alone(TOKENS, single, outer=outer)) for outer in ("device", "host")]
    assert same(*states)


def test_the_state_is_on_the_card_and_so_is_all_that_a_round_computes(bench, text, single):
    made = bench(text, total=TOKENS, **OPTIONS["diloco"])
    node = made.alone(TOKENS, single, outer="device")
    state = checkpoint_state(node)[0]["method"]
    large = [x for name, x in state.items() if x.dim()]
    assert large
    assert all(is_on_device(x) for x in large)


class Counted:
    """Bytes that a node's rounds copied between the card and the host."""

    def __init__(self, bench, text, single, outer, **options):
        made = bench(text, total=TOKENS, period=PERIOD, **options)
        self.rounds = TOKENS // 64 // PERIOD
        self.weights = 4 * made.plan.model.parameters()
        CARD.reset_counters()
        steps = 2 * 2 * 32 * 8 * (TOKENS // 64)  # tokens and targets
        made.alone(TOKENS, single, outer=outer)
        self.to_card = CARD.to_card_bytes - steps - self.weights  # the model's first journey
        self.from_card = CARD.from_card_bytes

    def travels_as_payloads(self, share):
        """Whether rounds copied payloads, of this share of the weights, and what a hash reads."""
        a_round = share * self.weights
        hashed = HASHED * self.weights * self.rounds
        return (
            self.to_card <= a_round * self.rounds + 2 * 512 * self.rounds
            and self.from_card - hashed <= a_round * self.rounds
        )


@pytest.mark.parametrize("codec", ["int8", pytest.param("bf16", marks=pytest.mark.ci_more)])
def test_a_round_copies_payloads_only(bench, text, single, codec, card):
    counted = Counted(bench, text, single, "device", codec=codec, return_codec=codec)
    assert counted.travels_as_payloads({"int8": 0.3, "bf16": PAYLOAD_SHARE}[codec])


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.ci_more)])
def test_a_copy_of_the_whole_model_is_found(bench, text, single, monkeypatch, whole, card):
    """Planted: all weights, or all but the smallest tensors, go to the host once a round."""
    step = PlainReplica.update

    def with_a_copy(replica, names, whats, change):
        for name in names:
            shape = replica.shapes[name]
            if whole or len(shape) > 1:
                replica.block(name, "param", 0, math.prod(shape)).cpu()
        return step(replica, names, whats, change)

    monkeypatch.setattr(PlainReplica, "update", with_a_copy)
    counted = Counted(bench, text, single, "device", codec="int8", return_codec="int8")
    assert not counted.travels_as_payloads(0.3)


@pytest.mark.parametrize(
    ("method", "founder"),
    [
        ("diloco", True),
        pytest.param("diloco", False, marks=pytest.mark.ci_more),
        pytest.param("sparseloco", True, marks=pytest.mark.ci_more),
        pytest.param("ddp", False, marks=pytest.mark.ci_more),
        pytest.param("lean", True, marks=pytest.mark.ci_more),
    ],
)
def test_a_state_on_a_card_and_one_on_a_cpu_end_as_one(bench, text, single, method, founder):
    made = bench(text, method, peers=2, total=3 * TOKENS, **OPTIONS[method])
    nodes = made.together((single, None) if founder else (None, single), "device")
    states = [method_state(node) for node in nodes]
    assert nodes[0].loop.driver.position == nodes[1].loop.driver.position
    assert same(*states)
    assert len({state_hash(state) for state in states}) == 1


@pytest.mark.parametrize(
    ("outer", "codec", "said"),
    [
        ("host", "ecsq:100", ""),
        ("device", "int8", "{}"),
        ("device", "topk2:8/64", "{}"),
        ("device", "ecsq:100", "{}, ecsq:100 on the CPU"),
        ("device", "ecsq:100+zstd", "{}, ecsq:100+zstd on the CPU"),
    ],
)
def test_status_says_where_exchanges_are_coded(bench, text, single, outer, codec, said):
    made = bench(text, total=TOKENS, codec=codec, feedback=0.9)

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer, device=single, outer=outer)
            node.peer.found()
            node.state_sync.open()
            return node.coded_on

    assert run_virtual(main()) == said.format(f"{single.place.type}:0")


@pytest.mark.ci_more
@pytest.mark.parametrize("first", ["device", "host"])
def test_a_checkpoint_goes_on_wherever_outer_state_is_kept(bench, text, single, tmp_path, first):
    made = bench(text, total=TOKENS, **OPTIONS["diloco"])
    saved = []

    def save(node):
        parts, cursors = checkpoint_state(node)
        folder = checkpoint.save(tmp_path, node.step, parts, {"node": cursors})
        saved.append(checkpoint.load(folder))

    made.alone(TOKENS // 2, single, outer=first, seen=save)
    second = {"device": "host", "host": "device"}[first]
    resumed = made.alone(TOKENS, single, outer=second, saved=saved[0])
    assert same(method_state(resumed), method_state(made.alone(TOKENS, single, outer=first)))
