"""A run that does not fit is refused with the numbers of device and host, before it is built."""

import asyncio
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from worlds.card import CARD, probabilities_bytes
from worlds.waiting import until

from farflock.node.assembly.checkpoints import last_of
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.device import Device, choose
from farflock.node.model.step_options import StepOptions
from farflock.node.process.entering import found, join
from farflock.node.process.network import MachineOptions
from farflock.node.process.room import fitted, reckoned, storage_of, with_room
from farflock.node.run.invite import parse
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import (
    StepChoices,
    evaluation_room,
    min_device_bytes,
    needed_bytes,
    needed_device_bytes,
    needed_shard_bytes,
    state_on_device,
)
from farflock.node.state.paths import RunFolder
from farflock.node.train.run_size import exchanged
from farflock.node.train.task import NoRoom
from farflock.swarm.roles import UNMEASURED

pytestmark = pytest.mark.net

LEAST, PLAIN = StepChoices(1, on_device=True), StepOptions()
SHAPE = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "context": 32}


def manifest(every=10, **train):
    terms = {"batch": 4, "seq": 32} | train
    evaluation = {"every": every}  # rounds; 0: the run is not evaluated
    made = {"model": SHAPE, "method": {"name": "local"}, "train": terms, "evaluation": evaluation}
    return resolve(made)


@pytest.fixture
def machine(tmp_path):
    """A machine that computes on this device."""
    here = RunFolder(tmp_path)
    return lambda device, folder=here, **more: MachineOptions(folder, device=device, **more)


def test_a_hopeless_model_is_refused_before_anything_is_put_on_the_device(card, machine):
    there, run = machine(choose()), manifest()
    there.device.release()
    CARD.reset_counters()
    CARD.leave_free(min_device_bytes(run.plan()) - 1)
    before = CARD.peak_bytes
    with pytest.raises(Failure, match="the run's model is too large for Double Card"):
        with_room(there, run, Failure)
    assert CARD.peak_bytes == before
    CARD.capacity_bytes += 1
    with_room(there, run, Failure)


@pytest.mark.ci_more
def test_a_step_that_does_not_fit_is_refused_with_all_numbers(card, machine):
    there, run = machine(choose()), manifest(every=0)
    there.device.release()
    CARD.reset_counters()
    CARD.leave_free(min_device_bytes(run.plan()) + 1000)
    free = there.device.memory()[0]
    with_room(there, run, RefusedByRun)
    with pytest.raises(RefusedByRun) as refused:
        asyncio.run(fitted(there, run, RefusedByRun))
    numbers = re.findall(r"([\d,]+) MB", str(refused.value))
    assert numbers[:2] == [
        f"{size / 1e6:,.0f}" for size in (needed_device_bytes(run.plan(), LEAST), free)
    ]
    assert len(numbers) == 4
    assert "train on the CPU (--device cpu)" in str(refused.value)


def test_a_device_gets_the_part_of_a_batch_that_fits(card, machine):
    there, run = machine(choose()), manifest()
    assert asyncio.run(fitted(there, run, Failure)).step_options == StepOptions(micro_batch=4)
    there.device.release()
    room = needed_device_bytes(run.plan(), LEAST) + probabilities_bytes(run.plan(), 1)
    CARD.leave_free(room)
    assert asyncio.run(fitted(there, run, Failure)).step_options.micro_batch in (1, 2)


def test_a_state_that_is_to_be_on_the_device_needs_room_there_too(card, machine):
    run = resolve({"model": SHAPE, "method": {"name": "diloco"}, "train": {"batch": 4, "seq": 32}})
    there, plan = machine(choose(), outer="device"), run.plan()
    there.device.release()
    CARD.leave_free(min_device_bytes(plan) + 4 * plan.model.parameters())
    with pytest.raises(Failure, match="\\(--outer host\\)"):
        with_room(there, run, Failure)
    with_room(replace(there, outer="host"), run, Failure)
    # Where weights, moments and state alone fit, the steps that are tried do not.
    room = min_device_bytes(plan) + state_on_device(exchanged(plan, 2))
    CARD.leave_free(room)
    with pytest.raises(Failure, match="\\(--outer host\\)"):
        asyncio.run(fitted(with_room(there, run, Failure), run, Failure))


def test_what_shards_have_room_for_is_reckoned(card):
    plan, there = manifest(batch=16).plan(), choose()

    def options(at_once, wanted=PLAIN, checkpoints=False):
        there.release()
        choices = StepChoices(at_once, True, checkpoints=checkpoints)
        CARD.leave_free(needed_shard_bytes(plan, choices, 2))
        return reckoned(plan, there, wanted, 2)

    assert options(8) == StepOptions(micro_batch=8), "of 16 sequences, each of two has 8"
    assert options(2) == StepOptions(micro_batch=2)
    assert options(8, StepOptions(micro_batch=3)) == StepOptions(micro_batch=3)
    deep = {"layers": 8}
    plan = resolve({"model": SHAPE | deep, "train": {"batch": 16, "seq": 32}}).plan()
    assert options(1, checkpoints=True) == StepOptions("on", micro_batch=1)
    assert options(1, StepOptions("off"), checkpoints=True) == StepOptions("off", micro_batch=1)


def test_a_shard_that_does_not_fit_is_refused(card, machine):
    run, there = manifest(), machine(choose(), ranks=SimpleNamespace(count=2))
    there.device.release()
    CARD.leave_free(min_device_bytes(run.plan()) // 2)
    with_room(there, run, Failure)
    CARD.capacity_bytes -= 1000
    with pytest.raises(Failure, match="too large for 2 processes: a shard of its weights"):
        with_room(there, run, Failure)
    with pytest.raises(Usage, match="--moments int8: several processes are this peer"):
        with_room(replace(there, step_options=StepOptions(moments="int8")), run, Failure)


def test_a_cpu_is_not_tried(machine):
    for wanted in (None, 2):
        here = machine(Device(), step_options=StepOptions(micro_batch=wanted))
        assert asyncio.run(fitted(here, manifest(), Failure)) is here


def free_bytes(monkeypatch, count):
    """Let this much of the host's memory be free."""
    free = SimpleNamespace(available=count, total=count)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)


def placed(there, run):
    return asyncio.run(fitted(with_room(there, run, Failure), run, Failure))


def test_a_node_that_has_room_to_train_alone_trains_and_says_once_that_others_evaluate(
    machine, monkeypatch, caplog
):
    run, here = manifest(batch=1), machine(Device())
    needed = needed_bytes(run.plan(), exchanged(run.plan(), 2))
    measuring = StepChoices(evaluates=True)
    more = needed_bytes(run.plan(), exchanged(run.plan(), 2), measuring)
    assert more > needed
    for free, evaluates in ((more, True), (more - 1, False), (needed, False)):
        caplog.clear()
        free_bytes(monkeypatch, free)
        assert placed(here, run).evaluates is evaluates
        said = [record for record in caplog.records if "leaves the evaluations" in record.msg]
        assert len(said) == (not evaluates)
        assert f"{free / 1e6:,.0f} MB are free" in (caplog.text or f"{free / 1e6:,.0f} MB are free")
    assert placed(here, manifest(every=0, batch=1)).evaluates, "there is nothing to leave to others"
    free_bytes(monkeypatch, needed - 1)
    with pytest.raises(Failure, match="too large for this machine"):
        with_room(here, run, Failure)


def test_on_a_device_the_copy_has_to_fit_beside_what_training_keeps(card, machine):
    there, run = machine(choose(), outer="host"), manifest(batch=1)
    there.device.release()
    needed, _ = evaluation_room(run.plan(), exchanged(run.plan(), 2), LEAST, "host", there.device)
    for spare, evaluates in ((4000, True), (-1, False)):
        CARD.leave_free(needed + spare)
        assert placed(there, run).evaluates is evaluates


@pytest.mark.ci_more
def test_a_founder_without_the_room_is_not_drawn(machine, monkeypatch):
    run, seen = manifest(batch=1), []
    free_bytes(monkeypatch, needed_bytes(run.plan(), exchanged(run.plan(), 2)))

    def started(node):
        seen.append(node.member.peer)
        node.stop()

    asyncio.run(found(machine(Device()), run, started))
    (peer,) = seen
    assert [member.stage for member in peer.context.views.newest.members] == [UNMEASURED]
    assert peer.evaluations.drawn(0) == ()


def test_the_host_needs_no_room_for_activations_beside_a_device(card, machine, monkeypatch):
    run = manifest(batch=512, every=0)
    free = SimpleNamespace(available=2_000_000, total=2_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    for outer, place in (("auto", "card"), ("device", "card"), ("host", "cpu")):
        there = with_room(machine(choose(), outer=outer), run, Failure)
        assert storage_of(there)((1,)).device.type == place
    with pytest.raises(Failure, match="compute fewer sequences at once \\(--micro-batch 1\\)"):
        with_room(machine(Device()), run, Failure)
    with_room(machine(Device(), step_options=StepOptions(micro_batch=1)), run, Failure)


@pytest.mark.ci_more
def test_a_node_that_runs_out_of_memory_for_good_saves_and_leaves(card, machine, caplog):
    # State on the device would need room there for the copies of a checkpoint.
    there, run, seen = machine(choose(), outer="host"), manifest(), []

    def started(node):
        seen.append(node)
        CARD.leave_free(1000)

    with pytest.raises(NoRoom, match="Double Card has no room for a step with one sequence"):
        asyncio.run(found(there, run, started))
    (node,) = seen
    assert node.member.peer.membership.admission.leaves
    assert last_of(there.folder, node.run).step == node.member.step == 0
    events = (there.folder.path / "events.jsonl").read_text()
    assert '"stopped"' in events


@pytest.mark.ci_more
def test_a_joiner_without_room_is_refused_before_it_downloads_anything(card, machine, tmp_path):
    nodes, downloaded, run = [], [], manifest()
    small = machine(choose(), folder=RunFolder(tmp_path / "small"))
    small.device.release()
    CARD.reset_counters()
    CARD.leave_free(min_device_bytes(run.plan()) + 1000)

    async def main():
        founder = asyncio.create_task(found(machine(Device()), run, nodes.append))
        await until(lambda: nodes)
        invite = parse(nodes[0].invite(), time.time())
        try:
            await join(small, invite, nodes.append, downloaded=lambda *given: downloaded.append(1))
        finally:
            nodes[0].stop()
            await founder

    with pytest.raises(RefusedByRun, match="too large for Double Card"):
        asyncio.run(main())
    assert (len(nodes), downloaded) == (1, [])
    assert nodes[0].member.peer.context.views.newest.peers == (nodes[0].links.me,)
