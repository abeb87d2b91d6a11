"""A stage's first weights are read stage by stage, and only the stage's own are taken."""

from types import SimpleNamespace

import pytest
import torch
from worlds.model_folder import QWEN3, SPLIT, write_model

from farflock.node.model.llama import build
from farflock.node.model.replica import in_memory
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.pipeline.lifecycle.first_weights import fetch_first, serve_first
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.state_sync import Spool, encode_state
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable
from farflock.swarm.sim.virtual_time import run_virtual


async def inline(work):
    return work()


class Peer:
    """A peer whose downloads come from what it serves itself."""

    def __init__(self):
        self.providers = {}
        self.snapshots = SimpleNamespace(serve=self.serve, fetch=self.fetch)

    def serve(self, name, provide, version):
        assert version() == version()
        self.providers[name] = provide

    async def fetch(self, name, timeout_s, *, max_bytes):
        if name not in self.providers:
            raise SnapshotUnavailable("nobody has it; try again")
        snapshot = await self.providers[name]()
        assert sum(map(len, snapshot.chunks)) <= max_bytes
        return snapshot


def plan_of(config):
    return RunPlan(1, config, InnerConfig(), Schedule(1e-3, 100), "ddp")


def fetched(peer, config, index):
    return run_virtual(fetch_first(peer, plan_of(config), even(config, 2)[index], index))


@pytest.mark.parametrize("config", [SPLIT, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("is_spooled", [False, True])
def test_a_stage_gets_its_own_weights_and_no_others(tmp_path, config, is_spooled):
    taken = []

    def storage(shape):
        taken.append(shape)
        return in_memory(shape)

    weights, peer = WeightsFolder(write_model(tmp_path / "m", config), config), Peer()
    spool = Spool(inline, storage) if is_spooled else None
    serve_first(peer, weights, PipelinePlan(even(config, 2), 128), (1,), inline, spool)
    assert list(peer.providers) == ["first/1"]
    assert not taken  # nothing is read before it is asked for
    found = fetched(peer, config, 1)
    wanted = dict(build(config, 77, even(config, 2)[1]).named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())
    assert len(taken) == is_spooled


def test_weights_that_nobody_serves_end_the_life():
    with pytest.raises(LifeOver, match="the first weights of stage 0 cannot be had: nobody has it"):
        fetched(Peer(), SPLIT, 0)


@pytest.mark.parametrize("lie", ["missing", "extra", "shape", "type", "hash"])
def test_other_tensors_are_not_taken(lie):
    honest = {name: x.detach() for name, x in build(SPLIT, 1, range(1)).named_parameters()}
    name = "model.layers.0.input_layernorm.weight"
    told = {
        "missing": {key: x for key, x in honest.items() if key != name},
        "extra": honest | {"more": torch.ones(1, dtype=torch.int8)},
        "shape": honest | {name: torch.ones(1)},
        "type": honest | {name: honest[name].bfloat16()},
        "hash": honest,
    }[lie]
    snapshot = encode_state(told, -1, 0)
    if lie == "hash":
        snapshot = Snapshot(-1, bytes(32), 0, snapshot.chunks)
    peer = Peer()

    async def provide():
        return snapshot

    peer.serve("first/0", provide, lambda: 0)
    with pytest.raises(LifeOver, match="the first weights of stage 0"):
        fetched(peer, SPLIT, 0)
