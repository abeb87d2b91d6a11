"""A machine's stage and whether it trains: by its option or by the members' need; and its node."""

import asyncio
import collections
import hashlib
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.card import CARD

from farflock.node.assembly.checkpoints import folder_of, save_all
from farflock.node.assembly.known_run import KnownRun
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.assembly.text import NodeText
from farflock.node.errors import Usage
from farflock.node.model.device import Device, choose
from farflock.node.pipeline.lifecycle.reservations import emptiest
from farflock.node.process import pipeline_role as pipeline_part
from farflock.node.process.network import MachineOptions
from farflock.node.process.pipeline_role import (
    founders,
    held,
    joiners,
    last_of_part,
    part_of,
)
from farflock.node.process.run_text import NodeInputs
from farflock.node.run.composition import Uncomposable
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import needed_stage_bytes, needed_stage_device_bytes
from farflock.node.run.terms import PipelinePlan
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import CheckpointError
from farflock.node.state.paths import RunFolder
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import Worker
from farflock.swarm.peer.calls import CallFailed
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.sim.virtual_time import run_virtual

THREE = PipelinePlan((range(1), range(1, 2), range(2, 3)), 512)
MANIFEST = resolve(
    {
        "model": {
            "dim": 16,
            "layers": 3,
            "heads": 2,
            "kv_heads": 2,
            "ffn_dim": 32,
            "context": 64,
            "tied": False,
        },
        "train": {"batch": 2, "seq": 32},
        "pipeline": {"stages": 3, "batch": 4},
        "method": {"name": "ddp", "options": {}},
        "run": {"name": "parts", "total_tokens": 10_000},
    }
)
RUN = "3" * 64


class Members:
    """A peer that knows these members once it has met them; some are gone."""

    def __init__(self, *stages, gone=(), answers=True, me="me"):
        self.me, self._gone, self._answers, self.asked = me, gone, answers, 0
        members = tuple(Member(f"m{number}", 1, stage) for number, stage in enumerate(stages))
        self._view = Certified(View(1, bytes(32), 0, members))
        self.context = self.calls = self

    async def ask(self, peer, request, payloads=(), *, timeout_s, max_reply_bytes):
        raise CallFailed("rpc", "an older build, which names no stage")

    @property
    def views(self):
        assert self.asked, "no peer was asked"
        return Chain(RUN, [self._view])

    def gone(self, view, peer):
        return peer in self._gone

    async def meet(self, records, timeout_s):
        self.asked += 1
        if not self._answers:
            raise TimeoutError


def joined(role, members, **options):
    return run_virtual(joiners(role, THREE, members, [b"record"], 5.0, **options))


@pytest.mark.parametrize(
    ("role", "found"),
    [
        ("auto", (0, True)),
        ("stage", (0, False)),
        ("stage:2", (2, False)),
        ("trainer", (NOTHING, True)),
        ("replica", (EVERY, True)),
    ],
)
def test_a_founder_serves_the_first_stage_and_trains_unless_told_otherwise(role, found):
    assert founders(role, THREE) == found


@pytest.mark.parametrize(
    ("role", "found"),
    [
        ("stage:0", (0, False)),
        ("stage:2", (2, False)),
        ("trainer", (NOTHING, True)),
        ("replica", (EVERY, True)),
    ],
)
def test_a_machine_with_a_given_role_asks_no_peer(role, found):
    members = Members(0, 0, 0)
    assert joined(role, members) == found
    assert not members.asked


@pytest.mark.parametrize(("stage", "found"), [(0, 0), (2, 2)])
def test_a_machine_that_starts_again_serves_the_stage_that_the_view_lists_for_it(stage, found):
    assert joined("auto", Members(0, 1, stage, 1, 2, me="m2"), founded=True) == (found, True)


@pytest.mark.parametrize("stage", [NOTHING, EVERY, 7])
def test_one_that_is_listed_with_no_stage_of_the_run_gets_the_emptiest(stage):
    members = Members(0, 1, stage, 1, 0, me="m2")
    assert joined("auto", members) == (2, False)


@pytest.mark.parametrize(
    "role",
    [
        "stage:3",
        "stage:9",
        "stage:-1",
        "stage:01",
        "stage:",
        "stage:1024",
        "replicas",
        "server",
        "",
    ],
)
def test_a_role_that_there_is_not_is_refused_with_those_that_there_are(role):
    for named in (lambda: founders(role, THREE), lambda: joined(role, Members(0, 1, 2))):
        with pytest.raises(
            Usage,
            match="run of 3 stages; "
            "choose from auto, trainer, replica, stage, stage:N, where N is below 3",
        ) as refused:
            named()
        assert repr(role) in str(refused.value)
        assert refused.value.exit_code == 2


@pytest.mark.parametrize("role", ["auto", "stage"])
@pytest.mark.parametrize(
    ("stages", "gone", "stage"),
    [
        ((0, 0, 1, 2, 2), (), 1),
        ((0, 0, 1, 1, 2), (), 2),
        ((0, 1, 1, 2, 2, NOTHING, NOTHING), (), 0),  # a peer that only trains serves nothing
        ((0, 1, 1, 1, 2, 2), ("m1", "m2", "m3"), 1),  # still listed
        ((1, 2, EVERY), (), 0),  # a whole replica has a part in each
    ],
)
def test_a_newcomer_serves_the_stage_that_the_fewest_living_members_serve(
    role, stages, gone, stage
):
    assert joined(role, Members(*stages, gone=gone)) == (stage, False)


def test_a_former_member_does_not_count_itself():
    assert joined("auto", Members(0, 0, 1, 2, me="m2")) == (1, False)


def test_members_that_do_not_answer_are_named():
    with pytest.raises(TimeoutError):
        joined("auto", Members(0, answers=False))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8), st.text("abcdef", min_size=1, max_size=8)
)
def test_the_emptiest_stage_has_none_that_is_emptier_and_is_one_peers_choice(servers, me):
    stage = emptiest(servers, me)
    assert servers[stage] == min(servers)
    assert emptiest(servers, me) == stage


def test_newcomers_at_the_same_time_go_to_different_stages():
    peers = [hashlib.sha256(bytes([number])).hexdigest() for number in range(60)]
    chosen = collections.Counter(emptiest((2, 1, 1, 1), peer) for peer in peers)
    assert chosen.keys() == {1, 2, 3}
    assert min(chosen.values()) >= 10


# the node


def made(
    bench,
    text,
    folder,
    stage,
    trains,
    manifest=MANIFEST,
    look=lambda node, keeper: None,
    device=None,
    run=run_virtual,
):
    """`part_of` on a simulated network, and what `look(node, keepers)` says of it."""
    swarm = bench(text)

    async def main():
        async with swarm.peer(0).running() as peer:
            machine = MachineOptions(RunFolder(folder), checkpoint_s=7.0, device=device or Device())
            known = KnownRun(RUN, "founder", manifest, b"")
            inputs = NodeInputs(machine, known, None, NodeText(ByteTokenizer(), text), None)
            node, keepers = part_of(
                inputs, peer, lambda kind, fields: None, stage, trains, Worker("stage")
            )
            found = look(node, keepers)
            return await found if asyncio.iscoroutine(found) else found

    return run(main())


@pytest.mark.parametrize(("stage", "trains"), [(0, True), (1, False), (2, False), (NOTHING, True)])
def test_the_node_does_what_was_chosen_and_what_it_holds_is_kept_apart(
    bench, text, tmp_path, stage, trains
):
    def look(node, keepers):
        assert node.role == role_of(stage)
        assert (node.trainer is not None) == trains
        if stage == NOTHING:
            assert node.serving is None
            assert keepers == []
            return
        (keeper,) = keepers
        assert (keeper.role, keeper.every_s, keeper.run) == (role_of(stage), 7.0, RUN)
        assert node.serving.loop.pause == keeper.pause
        assert {name for name, _ in node.serving.model.named_parameters()} < {
            name for name, _ in whole(node)
        }

    def whole(node):
        from farflock.node.model.llama import build

        return build(node.plan.model, 0).named_parameters()

    made(bench, text, tmp_path, stage, trains, look=look)


def steps_of(node, keeper):
    """The step at which each stage's checkpoint lets the node go on, by stage."""
    return {serving.index: serving.loop.step for serving in node.servings}


@pytest.mark.net
def test_its_last_checkpoint_of_this_stage_is_handed_over_and_one_of_another_stage_is_not(
    bench, text, tmp_path
):
    async def save(node, keepers):
        node.serving.loop.step = 5
        return await save_all(keepers, RunFolder(tmp_path))

    written = made(bench, text, tmp_path, 1, False, look=save, run=asyncio.run)  # in a thread
    assert written == folder_of(RunFolder(tmp_path), "stage:1") / "step-5"
    assert made(bench, text, tmp_path, 1, False, look=steps_of) == {1: 5}
    assert made(bench, text, tmp_path, 2, False, look=steps_of) == {2: 0}


def test_a_checkpoint_of_another_run_is_not_written_over(bench, text, tmp_path):
    async def save(node, keeper):
        parts, cursors = checkpoint_state(node.serving)
        checkpoint.save(
            folder_of(RunFolder(tmp_path), "stage:1"), 3, parts, {"run": "4" * 64, "node": cursors}
        )

    made(bench, text, tmp_path, 1, False, look=save)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        made(bench, text, tmp_path, 1, False)
    assert (
        made(bench, text, tmp_path, NOTHING, True, look=lambda node, keeper: node.role) == "trainer"
    )


def test_a_stage_that_does_not_fit_this_machine_is_refused_and_a_trainer_needs_no_room(
    bench, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1000)
    )
    with pytest.raises(Uncomposable, match="serving stage 2 of 3") as refused:
        made(bench, text, tmp_path, 2, False)
    assert refused.value.exit_code == 2
    assert (
        made(bench, text, tmp_path, NOTHING, True, look=lambda node, keeper: node.role) == "trainer"
    )


def test_all_that_touches_weights_has_one_thread(bench, text, tmp_path):
    async def names(node, keeper):
        import threading

        means = node.means
        ways = [means.compute, means.train, lambda work: means.run_pass(work, 3.0)]
        return {await way(lambda: threading.current_thread().name) for way in ways}

    (name,) = made(bench, text, tmp_path, 0, True, look=names)
    assert name.startswith("stage")


def test_a_run_of_whole_models_has_no_parts(bench, text, tmp_path):
    with pytest.raises(AssertionError, match="no stages"):
        made(bench, text, tmp_path, 0, True, manifest=replace_pipeline(MANIFEST))


def replace_pipeline(manifest):
    import msgspec

    return msgspec.structs.replace(manifest, pipeline=None)


@pytest.mark.parametrize(("role", "trains"), [("auto", True), ("stage", False), ("stage:1", False)])
def test_a_founder_that_comes_back_trains_again_if_it_was_to(role, trains):
    """It may be the only trainer that there is."""
    assert joined(role, Members(0, 0, 1), founded=True)[1] is trains


# a full replica


@pytest.mark.net
def test_a_replica_serves_every_stage_trains_and_keeps_each_stage_by_itself(bench, text, tmp_path):
    async def save(node, keepers):
        assert (node.role, [serving.index for serving in node.servings]) == ("replica", [0, 1, 2])
        assert node.trainer is not None
        assert [keeper.role for keeper in keepers] == ["stage:0", "stage:1", "stage:2"]
        for serving, keeper in zip(node.servings, keepers, strict=True):
            assert serving.loop.pause == keeper.pause
            serving.loop.step = 5 + serving.index
        return await save_all(keepers, RunFolder(tmp_path))

    written = made(bench, text, tmp_path, EVERY, True, look=save, run=asyncio.run)  # in a thread
    assert written == RunFolder(tmp_path).checkpoints
    for stage in range(3):
        (saved,) = [
            path for _, path in checkpoint.steps(folder_of(RunFolder(tmp_path), f"stage:{stage}"))
        ]
        assert saved.name == f"step-{5 + stage}"
    assert made(bench, text, tmp_path, EVERY, True, look=steps_of) == {0: 5, 1: 6, 2: 7}
    assert made(bench, text, tmp_path, 1, False, look=steps_of) == {1: 6}, (
        "a replica's stage is a stage's"
    )


def test_a_replica_was_as_far_as_its_stage_that_was_furthest_behind(bench, text, tmp_path):
    folder, cut = RunFolder(tmp_path), MANIFEST.pipeline_plan()
    assert last_of_part(folder, RUN, cut, EVERY) is None

    async def save(node, keeper):
        for index, tokens in ((0, 900), (1, 300), (2, 600)):
            parts, cursors = checkpoint_state(node.servings[index])
            meta = {"run": RUN, "node": cursors, "tokens": tokens}
            if index < 2 or len(written):
                checkpoint.save(folder_of(folder, f"stage:{index}"), 3 + len(written), parts, meta)

    written = []
    made(bench, text, tmp_path, EVERY, True, look=save)
    assert last_of_part(folder, RUN, cut, EVERY) is None, "a stage was never kept"
    assert last_of_part(folder, RUN, cut, 0).meta["tokens"] == 900
    written.append(1)
    made(bench, text, tmp_path, EVERY, True, look=save)
    assert last_of_part(folder, RUN, cut, EVERY).meta["tokens"] == 300
    assert last_of_part(folder, RUN, cut, NOTHING) is None


def test_what_is_held_by_whom():
    assert held(THREE, EVERY) == (0, 1, 2)
    assert held(THREE, 1) == (1,)
    assert held(THREE, NOTHING) == ()


def test_a_replica_that_does_not_fit_this_machine_is_refused_before_anything_is_built(
    bench, text, tmp_path, monkeypatch
):
    built = []
    monkeypatch.setattr(pipeline_part, "PipelineNode", lambda *work: built.append(work))
    room = sum(
        needed_stage_bytes(MANIFEST.plan(), MANIFEST.pipeline_plan(), stage) for stage in range(3)
    )
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=room - 1, total=room - 1)
    )
    with pytest.raises(Uncomposable, match="a full replica holds all 3 stages") as refused:
        made(bench, text, tmp_path, EVERY, True)
    assert refused.value.exit_code == 2
    assert "--role stage" in refused.value.remedy
    assert not built


# on a device


def device_needs(stages=range(3)):
    return [
        needed_stage_device_bytes(MANIFEST.plan(), MANIFEST.pipeline_plan(), stage)
        for stage in stages
    ]


@pytest.mark.parametrize("stage", [1, EVERY])
def test_stages_lie_on_the_machines_device(bench, text, tmp_path, card, stage):
    def look(node, keepers):
        return [x for serving in node.servings for x in serving.model.parameters()]

    weights = made(bench, text, tmp_path, stage, False, look=look, device=choose())
    assert all(x.device.type == card.type for x in weights)


def test_stages_that_do_not_fit_a_device_are_refused_with_both_numbers(bench, text, tmp_path, card):
    CARD.sweep()
    CARD.leave_free(sum(device_needs()) - 1)
    made(bench, text, tmp_path, 1, False, device=choose())
    CARD.sweep()
    CARD.leave_free(sum(device_needs()) - 1)
    with pytest.raises(Uncomposable, match="serving all stages of 3 takes about") as refused:
        made(bench, text, tmp_path, EVERY, True, device=choose())
    assert "of the device's memory, and" in str(refused.value)
    assert "--device cpu" in refused.value.remedy


def test_a_node_does_not_offer_to_move_to_a_stage_that_its_device_does_not_hold(
    bench, text, tmp_path, card
):
    """It offers less memory than that stage needs of the host's."""
    largest = max(range(3), key=lambda stage: device_needs()[stage])
    smallest = min(range(3), key=lambda stage: device_needs()[stage])
    CARD.sweep()
    CARD.leave_free(device_needs()[largest] - 1)

    def look(node, keepers):
        return node.means.memory_bytes, node.means.needs_bytes

    offered, needs = made(bench, text, tmp_path, smallest, False, look=look, device=choose())
    assert offered < needs[largest]
    offered, needs = made(bench, text, tmp_path, smallest, False, look=look)
    assert offered > needs[largest]
