"""A node's part in a pipeline on the simulated network: its process's view, each method, deaths."""

import asyncio
import collections
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from worlds import pipeline_audit
from worlds.pipeline_audit import MODEL, TEXT, TOKENS, Audit

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.model.llama import build
from farflock.node.model.stage_tensors import joined
from farflock.node.pipeline.lifecycle.assembly import of_share
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.lifecycle.state import round_of
from farflock.node.pipeline.node import PipelineNode, _Together
from farflock.node.pipeline.passes.edges import edges_of
from farflock.node.pipeline.passes.requests import Confirm, Refused, decode_answer, encode
from farflock.node.pipeline.recovery.rebuild import LR_BUMP
from farflock.node.run.policies import POLICIES, policy_of
from farflock.node.run.split import even
from farflock.node.run.terms import TrainerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PeerRole, PipelineWorld, parts
from farflock.node.state import checkpoint
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.paths.policy import Microbatch, StageServers
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")
BATCH = 4
METHODS = {
    "diloco": {"period": 2},
    "diloco with feedback": {"period": 3, "feedback": 0.9, "codec": "int4"},
    "sparseloco": {"period": 2},
    "streaming": {"period": 2, "fragments": 2},
}
EQUAL = structs.replace(MODEL, layers=6)  # stages that can be made from each other


def often(names, *everyday):
    """Those of every day, and the others for long runs."""
    return [
        name if name in everyday else pytest.param(name, marks=pytest.mark.long) for name in names
    ]


def plan(total=10**9, seed=0, rate=0.3, model=MODEL, **options):
    made = pipeline_audit.plan(seed, total, rate=rate, **options)
    return replace(made, model=model)


def audit(who, plan, stages, limit_s=600.0, **options):
    around = PipelineWorld(
        who, plan.schedule.total_tokens, view_s=2.0, away_s=(3.0, 8.0), limit_s=limit_s
    )
    cut = replace(
        pipeline_audit.pipeline(stages, BATCH, **options), stages=tuple(even(plan.model, stages))
    )
    return Accounts(plan, cut, around)


class Accounts(Audit):
    """The audit for methods whose servers step on their own.

    A contribution is made of its own microbatches, each counts once, and the group agrees on its
    state after every round.
    """

    def __init__(self, *world):
        super().__init__(*world)
        self.begun_anew = True  # the servers of a stage have weights of their own between rounds
        self.agreed = collections.defaultdict(set)  # by stage, stream and round
        self.noted = collections.Counter()  # by stage and round, the peers with that state

    def weights_of(self, life):
        life.weights.clear()  # they change between two rounds as well
        return super().weights_of(life)

    def watch(self, number, node):
        super().watch(number, node)
        for serving in node.servings:
            self._note_states(serving)

    def _note_states(self, serving):
        driver, index = serving.loop.driver, serving.index
        apply = driver.apply

        def noting(action, *rest):
            second_phase, key = apply(action, *rest), action.exchange.key
            if driver.method.equality == "exact" and action.result.status != "failed":
                mark = state_hash(driver.method.agreed(driver.replica, key.stream))
                self.agreed[index, key.stream, key.round].add(mark)
                self.noted[index, key.round] += 1
            return second_phase

        driver.apply = noting

    def _check_round(self, stage, number, results):
        """No mean of gradients here."""

    def check(self):
        super().check()
        for (stage, number, _), passes in self.brought.items():
            named = self.named[stage].get(number)
            assert named is None or passes.keys() <= set(named) or not passes.keys() & set(named)
        assert all(len(states) == 1 for states in self.agreed.values()), (
            "a group is not of one state"
        )
        return self


def now():
    return asyncio.get_running_loop().time()


# what its process sees


def test_a_process_sees_what_each_node_is_how_far_it_is_and_what_it_has_done():
    steps = 6
    one = audit(
        (PeerRole(0, trains=True), PeerRole(1), PeerRole(trains=True)),
        plan(steps * BATCH * TOKENS),
        2,
    )
    one.run().check()
    both, server, trainer = (one.sim.nodes[number] for number in range(3))
    assert [node.role for node in (both, server, trainer)] == ["stage:0", "stage:1", "trainer"]
    assert [node.tokens for node in (both, server, trainer)] == [steps * BATCH * TOKENS] * 3
    assert both.step == both.serving.loop.step >= steps
    assert trainer.step == trainer.trainer.source.begun > 0

    merged = [node.serving.server.served["merged"] for node in (both, server)]
    finished = [node.trainer.commits.finished for node in (both, trainer)]
    assert sum(finished) >= (steps - 1) * BATCH
    assert both.trained_tokens == TOKENS * max(merged[0], finished[0])
    assert server.trained_tokens == TOKENS * merged[1] >= steps * BATCH * TOKENS
    assert trainer.trained_tokens == TOKENS * finished[1]

    assert set(server.work) == {"forward", "backward", "merged", "busy"}
    assert set(trainer.work) == {"microbatches", "under way", "in doubt", "dropped", "doubled"}
    assert both.work == {
        **{name: both.serving.server.served[name] for name in server.work},
        "microbatches": finished[0],
        "under way": both.trainer.kept,
        "dropped": 0,
        "in doubt": 0,
        "doubled": 0,
    }
    assert both.work["forward"] >= merged[0]
    assert server.work["forward"] == 0
    for node in (both, server, trainer):
        assert 0 < node.last_loss < 2 * math.log(MODEL.vocab_size)


def test_a_node_that_is_told_to_stop_does_and_the_others_go_on():
    one = audit(parts(2, 2, 2), plan(), 2)
    seen = []

    async def stop_two(sim):
        while not sim.settled or one.events["closed"] < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for number in (3, 4):  # a server and a trainer
            assert not sim.nodes[number].stopping
            sim.nodes[number].stop()
            assert sim.nodes[number].stopping
        await asyncio.sleep(3.0)
        assert sim.done == {3, 4}
        other = sim.nodes[5].trainer
        for number in (3, 4):  # a process ends then, and says so
            sim.nodes[number].peer.leave()
            sim.kill(number, None)
        before = other.commits.finished
        await asyncio.sleep(5.0)
        seen.append(other.commits.finished - before)
        sim.end()

    one.run(stop_two).check().check_finished()
    assert seen[0] > 5


def test_a_server_that_fails_ends_its_nodes_run():
    one = audit((PeerRole(0, trains=True), PeerRole(1)), plan(), 2)

    def with_a_bug(number, node):
        look(number, node)
        if number == 1:
            server = node.serving.server
            read = server.passes.read

            def fails_in_time(asked):
                if server.served["backward"] > 5:
                    raise ZeroDivisionError("a bug")
                return read(asked)

            server.passes.read = fails_in_time

    look, one.watch = one.watch, with_a_bug
    with pytest.raises(ZeroDivisionError, match="a bug"):
        one.run()


def test_a_member_that_does_not_run_yet_lets_calls_wait():
    """A founder waits for others; the others must not wait an hour because a first call failed."""
    steps = 3
    one = audit((PeerRole(0), PeerRole(1), PeerRole(trains=True)), plan(steps * BATCH * TOKENS), 2)
    began = []

    def late_founder(number, node):
        look(number, node)
        if number == 0:
            run = node.run

            async def later(total):
                await asyncio.sleep(20.0)
                began.append(one.sim.nodes[2].trainer.source.begun)
                await run(total)

            node.run = later

    look, one.watch = one.watch, late_founder
    one.run().check()
    assert began[0] > 0, "no peer asked the founder before it ran"
    assert one.tale.virtual_s < 120


# every kind of method


@pytest.mark.parametrize("name", often(METHODS, "diloco"))
def test_servers_that_step_on_their_own_sync_their_stage_and_no_microbatch_is_lost_or_doubled(name):
    made = plan(16 * BATCH * TOKENS, method=name.split()[0], options=METHODS[name], rate=0.05)
    one = audit(parts(2, 2, 2), made, 2)
    one.run().check().check_finished()
    together = collections.Counter()
    for fields in one.tale.fields("round"):
        together[fields["stream"]] += fields["peers"] == 2 and fields["status"] == "ok"
    first = one.sim.nodes[0].serving.loop.driver
    assert set(together) == {entry.key.stream for entry in first.method.streams(first.replica)}
    assert min(together.values()) >= 4
    assert len(one.finished()) >= 8 * BATCH
    moved = {
        name: x for node in one.sim.nodes.values() if node.serving for name, x in parameters(node)
    }
    start = dict(build(MODEL, made.run_seed).double().named_parameters())
    assert all(not torch.equal(x, start[name]) for name, x in moved.items())


@pytest.mark.parametrize("name", often(METHODS, "diloco"))
def test_full_replicas_and_pipelines_that_step_on_their_own_agree_on_each_stages_state(name):
    made = plan(16 * BATCH * TOKENS, method=name.split()[0], options=METHODS[name], rate=0.05)
    one = audit(parts(2, 2, 2, replicas=1), made, 2)
    one.run().check().check_finished()
    replica = one.sim.nodes[6]
    together = collections.Counter()
    for fields in one.tale.fields("round"):
        together[fields["stream"], fields.get("stage")] += (
            fields["peers"] == 3 and fields["status"] == "ok"
        )
    streams = [
        entry.key.stream
        for entry in driver_of(replica, 0).method.streams(driver_of(replica, 0).replica)
    ]
    assert all(together[stream, stage] >= 3 for stream in streams for stage in (0, 1)), together
    if driver_of(replica, 0).method.equality == "exact":
        assert all(
            max(one.noted[stage, number] for number in one.named[stage]) == 3 for stage in (0, 1)
        )
    named = collections.Counter(peer for keys in one.named[0].values() for peer, _ in keys)
    assert min(named[identity_of(made, number).peer] for number in (4, 5, 6)) > 5, (
        "a server's work does not count"
    )
    start = dict(build(MODEL, made.run_seed).named_parameters())
    moved = {
        name: x for serving in replica.servings for name, x in serving.model.named_parameters()
    }
    assert moved.keys() == start.keys()
    assert all(not torch.equal(x.detach().float(), start[name]) for name, x in moved.items())


def driver_of(node, stage):
    return node.servings[stage].loop.driver


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", *METHODS])
def test_a_stage_of_any_method_that_died_out_restarts_at_the_round_where_it_stopped(name):
    options = METHODS.get(name, {"codec": "fp32", "return_codec": "fp32"})
    made = plan(
        28 * BATCH * TOKENS, model=EQUAL, method=name.split()[0], options=options, rate=0.05
    )
    one = audit(parts(3, 2, 1), made, 3)

    async def die_out(sim):
        while not sim.settled or len(one.named[1]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for number in (1, 4):
            sim.kill(number, 2.0 + number)
        while sum(life.stage == 1 for life in one.lives[6:]) < 2 or not sim.settled:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        back_at = len(one.named[1])
        while len(one.named[1]) < back_at + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        sim.end()

    one.run(die_out).check()
    (trainer,) = (node.trainer for node in one.sim.nodes.values() if node.trainer is not None)
    assert (trainer.commits.doubled, trainer.commits.lost) == (0, 0)
    begun = [entry for entry in one.tale.fields("stage") if entry["round"] >= 0]
    # one, or two at once
    assert {(entry["stage"], entry["from"]) for entry in begun} == {(1, "mean")}
    later = [life for life in one.lives[6:] if life.stage == 1]
    assert len(later) >= 2
    assert {life.serving.training_task.rate_factor() for life in later} == {LR_BUMP}, (
        "all of the stage learn as fast"
    )
    assert {
        life.serving.training_task.rate_factor() for life in one.lives if life not in later
    } == {1.0}
    rounds, stride = (
        [number for number in sorted(one.named[1]) if number > begun[0]["round"]],
        stride_of(one),
    )
    assert len(rounds) >= 3
    assert rounds == list(range(rounds[0], rounds[-1] + 1, stride)), "rounds are missing"
    assert rounds[0] <= begun[0]["round"] + stride


def stride_of(one):
    return one.sim.nodes[0].stage_directory.streams[1].stride


def parameters(node):
    return [(name, x.detach()) for name, x in node.serving.model.named_parameters()]


# lives that end


@pytest.mark.long
def test_a_server_that_was_cut_off_while_its_stage_went_on_begins_another_life_with_its_state():
    # an adopted state has fp32 weights, which steps would move apart from doubles
    still = plan(rate=pipeline_audit.STILL)
    one = audit(parts(2, 3, 1), still, 2)

    async def cut_off(sim):
        while not sim.settled or len(one.named[1]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        everybody = {identity_of(one.plan, number).peer for number in range(7)}
        alone = identity_of(one.plan, 5).peer
        sim.network.partition({alone}, everybody - {alone})
        stopped_at = max(one.named[1])
        while max(one.named[1]) < stopped_at + 2 * LOG_ROUNDS:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        sim.network.heal()
        while sum(life.number == 5 for life in one.lives) < 2 or not sim.settled:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        back_at = max(one.named[1])
        while max(one.named[1]) < back_at + 5:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        sim.end()

    one.run(cut_off).check().check_finished()
    over = [fields for _, number, what, fields in one.tale.events if what == "over"]
    assert [number for _, number, what, _ in one.tale.events if what == "over"] == [5], over
    again = [life for life in one.lives if life.number == 5]
    assert len(again) == 2
    assert again[1].serving.loop.step >= 3


def test_a_life_that_is_over_says_why_and_where_to():
    assert LifeOver("the stage went on").stage is None
    over = LifeOver("goes from stage 1 to stage 2", 2)
    assert (str(over), over.stage) == ("goes from stage 1 to stage 2", 2)


def test_a_node_whose_state_is_on_its_way_has_no_tokens_yet():
    found = []
    one = audit((PeerRole(0, trains=True), PeerRole(1)), plan(BATCH * TOKENS), 2)
    one.watch = lambda number, node: found.append(node.tokens)
    one.run()
    assert found == [0, 0]


# the run's end


def test_a_peer_that_knows_of_the_end_stays_until_all_know_so_a_stage_ends_with_one_state():
    total, over_s, stage_directory = 6 * BATCH * TOKENS, [], []
    one = audit((PeerRole(EVERY, trains=True), PeerRole(0), PeerRole(1)), plan(total, rate=1e-3), 2)

    def late(number, node):
        tokens = node.stage_directory.tokens

        def heard():
            over_s.extend([asyncio.get_running_loop().time()] if tokens() >= total else [])
            return (
                tokens()
                if over_s and asyncio.get_running_loop().time() > over_s[0] + 6.0
                else min(tokens(), total - 1)
            )

        if number == 0:
            stage_directory.append(tokens)
            node.stage_directory.tokens = heard
        look(number, node)

    look, one.watch = one.watch, late
    one.run().check()
    ended = collections.defaultdict(set)
    for node in one.sim.nodes.values():
        for serving in node.servings:
            assert serving.loop.stop.requested
            ended[serving.index].add(serving.state_sync.applied_round)
    assert all(len(rounds) == 1 for rounds in ended.values()), ended
    assert stage_directory[0]() > total + BATCH * TOKENS, "nothing came after the end"


# from a checkpoint


@pytest.mark.usefixtures("anywhere")
def test_a_founder_goes_on_from_its_checkpoint_at_the_round_where_its_stage_stopped(tmp_path):
    steps = 5
    one = audit((PeerRole(0, trains=True), PeerRole(1)), plan(steps * BATCH * TOKENS, rate=1e-3), 2)
    one.run().check()
    saved = []
    for number in (0, 1):
        tensors, cursors = checkpoint_state(one.sim.nodes[number].serving)
        folder = checkpoint.save(
            tmp_path / str(number), 5, tensors, {"node": cursors, "tokens": steps * BATCH * TOKENS}
        )
        saved.append(checkpoint.load(folder))

    again = audit(
        (PeerRole(0, trains=True), PeerRole(1)), plan(2 * steps * BATCH * TOKENS, rate=1e-3), 2
    )
    begun = {}

    def load_state(number, node):
        node.saved = {number: saved[number]}
        look(number, node)

    async def watch(sim):
        while not sim.settled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for number in (0, 1):
            begun[number] = one.sim.nodes[number].tokens

    look, again.watch = again.watch, load_state
    again.run(watch)
    for stage, rounds in again.named.items():
        before = max(one.named[stage])
        assert min(rounds) == before + 1, stage
        assert max(rounds) >= before + steps - 1
        first = min(entry for entry in again.versions if entry[0] == stage)
        assert first[1] == before
        for name, x in again.versions[first][0].items():
            assert torch.equal(x.float(), saved[stage].groups["model"][name])
    assert all(node.tokens == 2 * steps * BATCH * TOKENS for node in again.sim.nodes.values())


@pytest.mark.usefixtures("anywhere")
def test_a_full_replica_resumes_from_checkpoints_of_its_stages_made_at_different_times(
    tmp_path,
):
    steps = 5
    one = audit((PeerRole(EVERY, trains=True),), plan(steps * BATCH * TOKENS, rate=1e-3), 2)
    saved, last = {}, steps - 1

    async def save(sim):
        while not sim.nodes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for stage, number in ((0, 2), (1, 3)):
            serving = sim.nodes[0].servings[stage]
            while serving.state_sync.applied_round < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tensors, cursors = checkpoint_state(serving)
            meta = {"node": cursors, "tokens": (number + 1) * BATCH * TOKENS}
            saved[stage] = checkpoint.load(
                checkpoint.save(tmp_path / str(stage), number, tensors, meta)
            )

    one.run(save).check()
    before = {stage: round_of(each) for stage, each in saved.items()}
    assert before[0] < before[1] <= last
    again = audit((PeerRole(EVERY, trains=True),), plan(2 * steps * BATCH * TOKENS, rate=1e-3), 2)

    def load_state(number, node):
        node.saved = saved
        look(number, node)

    look, again.watch = again.watch, load_state
    again.run().check().check_finished()
    for stage, rounds in again.named.items():
        assert min(rounds) == before[stage] + 1
        for name, x in again.versions[stage, before[stage]][0].items():
            assert torch.equal(x.float(), saved[stage].groups["model"][name])
    assert again.sim.nodes[0].tokens >= 2 * steps * BATCH * TOKENS


# what all do alike


@pytest.mark.parametrize(
    ("staleness", "batch", "window", "expected"),
    [(1, 8, 64, 8), (3, 8, 64, 24), (0, 8, 64, 8), (2, 8, 5, 5)],
)
def test_no_more_microbatches_are_on_their_way_than_may_be_late(
    bench, staleness, batch, window, expected
):
    made = plan()
    base = pipeline_audit.pipeline(2, batch, trainer=TrainerTerms(window=window, kept=64))
    cut = replace(base, server=replace(base.server, staleness=staleness))
    node = node_of(bench, made, cut, NOTHING, tokens=TEXT)
    assert node.trainer._terms.window == expected


def node_of(bench, made, cut, stage, report=lambda kind, fields: None, **options):
    from farflock.node.pipeline.lifecycle.assembly import NodeServices

    async def build_it():
        return PipelineNode(
            made, cut, bench(TEXT).peer(0), NodeServices(None, None, None, report), stage, **options
        )

    return run_virtual(build_it())


def test_a_full_replica_holds_all_stages_and_answers_for_each(bench):
    cut = pipeline_audit.pipeline(3, BATCH)
    node = node_of(bench, plan(), cut, EVERY, tokens=TEXT)
    assert (node.role, list(node.stage_directory.streams)) == ("replica", [0, 1, 2])
    assert [serving.model.span for serving in node.servings] == list(cut.stages)
    together = joined(serving.model.state_dict() for serving in node.servings)
    whole = build(MODEL, plan().run_seed).double().state_dict()
    assert all(torch.equal(x, whole[name]) for name, x in together.items())
    assert together.keys() == whole.keys()
    for serving in node.servings:
        request = encode(Confirm(1, serving.index, 1))
        assert node.peer.calls.handler.admit("t", request, ()) is None
    assert isinstance(
        decode_answer(node.peer.calls.handler.admit("t", encode(Confirm(1, 3, 1)), ())), Refused
    )


def test_a_full_replicas_rounds_say_of_which_stage_they_are_and_one_stage_notes_the_steps(bench):
    said = []
    node = node_of(
        bench,
        plan(),
        pipeline_audit.pipeline(3, BATCH),
        EVERY,
        report=lambda kind, fields: said.append((kind, fields)),
    )
    for serving in node.servings:
        serving.loop.report("step", {"step": 4, "loss": 1.0 + serving.index})
        serving.loop.report("round", {"stream": "s"})
    rounds = [fields for kind, fields in said if kind == "round"]
    assert rounds == [{"stream": "s", "stage": stage} for stage in range(3)]
    assert [fields for kind, fields in said if kind == "step"] == [{"step": 4, "loss": 3.0}]


def test_several_downloads_are_told_as_one():
    told = []
    together = _Together(lambda here, total: told.append((here, total)))
    first, second = together.download(), together.download()
    first(1, 4)
    second(0, 6)
    first(4, 4)
    second(6, 6)
    assert told == [(1, 4), (1, 10), (4, 10), (10, 10)]


@pytest.mark.parametrize("stage", [0, 2, NOTHING])
def test_a_node_holds_its_stage_and_knows_the_streams_of_all(bench, stage):
    cut = pipeline_audit.pipeline(3, BATCH)
    node = node_of(bench, plan(), cut, stage, tokens=TEXT if stage == NOTHING else None)
    assert node.role == role_of(stage)
    assert list(node.stage_directory.streams) == [0, 1, 2]
    assert (node.serving is None) == (stage == NOTHING) == (node.trainer is not None)
    if stage != NOTHING:
        assert node.serving.model.span == cut.stages[stage]
        assert node.serving.model.lm_head is None or stage == 2


def test_a_server_counts_its_steps_on_from_its_checkpoint_and_learns_as_a_newcomer_does(bench):
    saved = {1: SimpleNamespace(step=500)}
    serving = node_of(bench, plan(), pipeline_audit.pipeline(2, BATCH), 1, saved=saved).serving
    assert (serving.loop.step, serving.training_task.joined_at) == (500, 500)


def test_the_stages_tensors_together_are_the_models():
    stages = [build(MODEL, 3, span) for span in even(MODEL, 3)]
    together, model = joined(stage.state_dict() for stage in stages), build(MODEL, 3).state_dict()
    assert together.keys() == model.keys()
    assert all(torch.equal(x, model[name]) for name, x in together.items())


def test_all_agree_on_what_goes_over_an_edge():
    made, cut = plan(), pipeline_audit.pipeline(2, BATCH, codec="int8")
    edges = edges_of(made, cut)
    assert (edges.batch, edges.seq, edges.tokens, edges.dtype) == (1, TOKENS, TOKENS, torch.float64)


@pytest.mark.parametrize("name", [*POLICIES, "skip:4"])
def test_every_policy_names_a_server_of_each_stage_and_the_same_one_to_equal_questions(name):
    layers = [1, 2, 2, 1]
    serving = StageServers(
        1, tuple(tuple(Announced(f"{stage}{place}", 1) for place in "abc") for stage in range(4))
    )
    walks = []
    for _ in range(2):
        policy = policy_of(name, layers, 5, "me")
        asked = [Microbatch(step, 0, 0) for step in range(12)]
        walks.append(
            [
                (stage, policy.next_hop(one, stage, serving, 0.0, 1.0))
                for one in asked
                for stage in policy.stage_order(one)
            ]
        )
    assert walks[0] == walks[1]
    assert all(peer[0] == str(stage) for stage, peer in walks[0])
    assert len(walks[0]) == 12 * 4


@pytest.mark.parametrize(
    "name", ["ddp", "diloco", "sparseloco", "streaming", "demo", "desloc", "edit", "lean", "sparta"]
)
def test_of_stages_that_others_serve_a_node_knows_shapes_and_holds_no_tensors(bench, name):
    """The whole model's size is what no node has room for."""
    options = {"fragments": 1} if name == "streaming" else {}  # a stage of one layer has no more
    node = node_of(bench, plan(method=name, options=options), pipeline_audit.pipeline(3, BATCH), 1)
    assert set(node.exchanges.made) == {0, 1, 2}, "its own ones too are asked for shapes alone"
    for templates in node.exchanges.made.values():
        tensors = [x for template in templates for x in template.tensors.values()]
        assert tensors
        assert all(x.device.type == "meta" for x in tensors)


def test_a_stage_that_two_thirds_visit_is_as_far_along_after_two_thirds_of_the_tokens():
    whole = Schedule(1.0, 3000, 600, 0.1)
    part = of_share(whole, Fraction(2, 3))
    assert (part.total_tokens, part.warmup_tokens) == (2000, 400)
    for tokens in range(599, 3000, 300):
        assert part.rate(tokens * 2 // 3, 0) == pytest.approx(whole.rate(tokens, 0), rel=1e-2)
