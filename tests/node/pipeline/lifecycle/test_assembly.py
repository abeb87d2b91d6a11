"""A stage's state is cut as it is stored, and read while its passes, steps and rounds go on."""

import collections
from dataclasses import replace
from itertools import islice

import pytest
import safetensors.torch
import torch
from worlds.pipeline_audit import TEXT, TOKENS, pipeline, plan

from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.node.state import cut as cuts
from farflock.node.state.cut import raw
from farflock.node.state.paths import RunFolder
from farflock.node.train.state_sync import Spool
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.parts import blocks
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.trial_options import law_options
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")
BATCH, STEPS = 4, 16
STAGE = 0  # of two: its state is cut
AFTER_ROUND = 3
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("diloco", "sparta")]
LATE = {  # of a pipeline that does not wait
    "server": ServerTerms(lease_s=20.0, staleness=3),
    "trainer": TrainerTerms(window=64, kept=128, forward_timeout_s=8.0, backward_timeout_s=12.0),
    "asynchronous": Asynchronous(4),
}


async def beside(work):
    """Compute, as another worker would."""
    return work()


class Watched:
    """A stage whose cuts are read one piece at a time, in the midst of its passes."""

    def __init__(self, serving, folder):
        self.serving, self.seen = serving, collections.Counter()
        self.keeper = CheckpointManager(serving, RunFolder(folder), "a" * 32, "", 0.0)
        self.expected, self.begun, self.readers, self.found = {}, {}, {}, {}
        serving.state_sync.spool = Spool(beside)
        driver, stage = serving.loop.driver, serving.server.stage
        self.apply, driver.apply = driver.apply, self.applying
        self.backward, serving.server.passes.backward = serving.server.passes.backward, self.back
        self.is_late = False  # whether the pass under way is at an older version of the weights
        for name in ("forward", "graph", "gradients"):
            setattr(stage, name, self.reading(getattr(stage, name)))

    def applying(self, action, *rest):
        second_phase = self.apply(action, *rest)
        self.seen["rounds"] += bool(self.begun)
        if action.exchange.key.round >= AFTER_ROUND and not self.begun:
            self.begin()
        return second_phase

    def begin(self):
        """Cut a snapshot and a checkpoint, and note what they must hold."""
        driver, sync = self.serving.loop.driver, self.serving.state_sync
        state = driver.method.snapshot(driver.replica)
        for entry in driver.streams:
            name = entry.key.stream
            state[f"next.{name}"] = torch.tensor(driver.position.rounds[name] + entry.stride)
        state |= {f"mark.{name}": torch.tensor(number) for name, number in sync.marks.items()}
        held = {"snapshot": state, **checkpoint_state(self.serving)[0]}
        self.expected = {name: safetensors.torch.save(dict(part)) for name, part in held.items()}
        self.begun = {"snapshot": sync.cut()[0], **self.keeper.cut().groups}
        assert not any(cut.saved_bytes for cut in self.begun.values()), "nothing is copied at once"
        self.found = {name: cut.head for name, cut in self.begun.items()}
        self.readers = {name: cut.read() for name, cut in self.begun.items()}

    def read(self, count=None):
        for name, reader in self.readers.items():
            is_live = not self.begun[name].saved_bytes
            pieces = [bytes(raw(piece)) for _, piece in islice(reader, count)]
            self.found[name] += b"".join(pieces)
            self.seen["late and live"] += len(pieces) * (is_live and self.is_late)

    def reading(self, compute):
        def computing(*given):
            self.read(1)
            return compute(*given)

        return computing

    def back(self, asked):
        version, newest = asked.request.version, self.serving.state_sync.applied_round
        self.is_late = version is not None and version.round < newest
        try:
            return self.backward(asked)
        finally:
            self.is_late = False


def watched(folder, name, **terms):
    """Run two stages with a method; return the one whose state was cut."""
    inner = InnerConfig("adamw", 1e-2, (0.9, 0.95), 0.1)
    options = law_options(METHODS[name])
    made = plan(0, STEPS * BATCH * TOKENS, rate=1e-2, method=name, options=options)
    made, found = replace(made, inner=inner, dtype=torch.float32), []
    world = PipelineWorld(
        parts(2, 1, 1), made.schedule.total_tokens, LinkModel(latency_s=0.1), limit_s=900.0
    )

    def watch(number, node):
        found.extend(Watched(each, folder) for each in node.servings if each.index == STAGE)

    async def main():
        await PipelineSimulation(made, pipeline(2, BATCH, **terms), world, TEXT, watch).run()

    run_virtual(main())
    return found[0]


@pytest.fixture
def small_pieces(monkeypatch):
    """Also of a test's model most tensors are cut as they are stored, and read in many pieces."""
    monkeypatch.setattr(cuts, "PIECE_BYTES", 128)
    monkeypatch.setattr(blocks, "BLOCK_VALUES", 16)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["ddp", "sparseloco", *LONG])
def test_a_stage_s_snapshot_and_checkpoint_are_of_the_moment_of_their_cut(tmp_path, name):
    one = watched(tmp_path, name)
    one.read()
    assert one.found == one.expected
    assert one.seen["rounds"] >= 2


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["diloco", pytest.param("ddp", marks=pytest.mark.long)])
def test_passes_of_older_versions_change_nothing_that_is_read_beside_them(tmp_path, name):
    one = watched(tmp_path, name, **LATE)
    one.read()
    assert one.found == one.expected
    assert one.seen["rounds"] >= 2
    assert one.seen["late and live"] >= 10
