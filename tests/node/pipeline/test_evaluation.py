"""Evaluation in whole simulated pipelines: what members in turn measure is the loss of the joined
model, and no gradient and no account is another for it."""

import asyncio
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from worlds import pipeline_audit
from worlds.pipeline_audit import MODEL, STILL, TEXT, TOKENS, Audit

from farflock.node.model.data import BadData, evaluation
from farflock.node.model.evaluation import losses, summarise
from farflock.node.model.llama import build
from farflock.node.pipeline.passes.requests import Measure
from farflock.node.run.evaluation_section import EvaluationSection, GuardSection
from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PeerRole, PipelineWorld, parts
from farflock.swarm.peer.evaluations import drawn
from farflock.swarm.roles import EVERY

pytestmark = pytest.mark.usefixtures("quiet_log")
HELD_OUT, SEQUENCES, STEP = TEXT[:200], 6, 8 * TOKENS
FIXED = {"policy": "fixed", "trainer": TrainerTerms(2, 64, 4.0, 6.0)}


def evaluated(who, steps=6, rate=STILL, every=2, measured_on=HELD_OUT, limit_s=600.0, **options):
    """An audit of a run that is evaluated; `options` are the pipeline's, and the run's seed."""
    stages, seed = options.pop("stages", 3), options.pop("seed", 0)
    terms = {name: options.pop(name) for name in ("batch", "samples", "dtype") if name in options}
    plan = replace(
        pipeline_audit.plan(seed, steps * STEP, rate=rate),
        evaluation=EvaluationSection(every, SEQUENCES),
        guard=GuardSection("warn"),
        **terms,
    )
    world = PipelineWorld(who, plan.schedule.total_tokens, view_s=2.0, limit_s=limit_s)
    one = Audit(plan, pipeline_audit.pipeline(stages, **options), world)
    one.measured_on = measured_on
    return one


def joined_loss(one):
    """The held-out loss of the model that the servers' stages make up at the end."""
    model = build(one.plan.model, one.plan.run_seed).double()
    state = {}
    for node in one.sim.nodes.values():
        for serving in node.servings:
            state |= dict(serving.server.stage.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(state[name])
    return summarise(losses(model, *evaluation(HELD_OUT, TOKENS, SEQUENCES)))


def told(one):
    """What each node knows at the end."""
    return [dict(node.evaluator.evaluations.known) for node in one.sim.nodes.values()]


BOTH = (PeerRole(0, trains=True), PeerRole(1), PeerRole(2))
ROLES = {
    "servers and a trainer": parts(3, 1, 1),
    "servers of which one trains": BOTH,
    "two servers of each stage": parts(3, 2, 1),
    "full replicas alone": (PeerRole(EVERY, trains=True),) * 2,
    "servers beside a replica": (*BOTH, PeerRole(EVERY, trains=True)),
}


def cases(known, *everyday):
    """Those of every day, and the others for long runs."""
    return [
        pytest.param(value, id=name, marks=[] if name in everyday else pytest.mark.long)
        for name, value in known.items()
    ]


@pytest.mark.parametrize("who", cases(ROLES, "servers of which one trains", "full replicas alone"))
def test_members_in_turn_measure_the_loss_of_the_joined_model_and_all_have_the_same_values(who):
    one = evaluated(who).run().check().check_finished()
    first, *others = told(one)
    assert all(known == first for known in others)
    assert {(0, 0), (2, 0)} <= first.keys() <= {(0, 0), (2, 0), (4, 0)}, "none is repeated"
    wanted, peers = joined_loss(one), []
    for (number, _), value in first.items():
        assert value.outcome == "ok"
        assert value.stream == one.sim.nodes[0].stage_directory.streams[0].name
        assert value.loss == pytest.approx(wanted.mean, rel=1e-6)
        assert value.standard_error == pytest.approx(wanted.standard_error, rel=1e-5)
        assert value.sequences == SEQUENCES
        assert (value.gradient_norm, value.busy) == (None, None)
        assert 0 < value.tokens <= one.plan.schedule.total_tokens
        view = one.sim.nodes[0].peer.context.views.at(number, 0)
        (signer, *_) = drawn(one.plan.run_seed, view, number, 0)
        peers.append(one.sim.nodes[0].evaluator.evaluations.signer((number, 0)))
        assert peers[-1] == signer.peer
    assert not any(node.evaluator.difference for node in one.sim.nodes.values())


def test_each_stage_has_merged_and_kept_what_it_has_without_evaluations():
    found = {}
    for every in (0, 1):
        one = evaluated(BOTH, steps=5, every=every)
        one.run().check().check_finished().check_memory()
        servers = [node.serving.server for node in one.sim.nodes.values()]
        assert [bool(server.served["measured"]) for server in servers] == [bool(every)] * 3
        found[every] = {
            stage: {number: keys for number, keys in rounds.items() if number < 5}
            for stage, rounds in one.named.items()
        }
        states = [dict(server.stage.model.named_parameters()) for server in servers]
        found[every]["states"] = [
            {name: x.tolist() for name, x in state.items()} for state in states
        ]
        assert all(server.passes.graphs.size_bytes < 2**20 for server in servers)
    assert found[0]["states"] == found[1]["states"]
    counted = [{key for keys in found[e][0].values() for key in keys} for e in (0, 1)]
    assert len(counted[0]) == len(counted[1]) >= 5 * 8
    assert counted[0] & counted[1]


def test_the_loss_falls_while_the_run_trains_and_the_newest_is_in_its_checkpoints():
    one = evaluated(parts(3, 1, 1), steps=12, rate=0.5, every=4).run()
    node = one.sim.nodes[0]
    losses_told = [each.loss for each in node.evaluator.measurements()]
    assert len(losses_told) >= 2
    assert losses_told[-1] < losses_told[0] - 0.05
    facts = node.evaluator.facts()["evaluation"]
    assert facts["loss"] == node.evaluator.newest.loss
    assert facts["by"] in {other.peer.me for other in one.sim.nodes.values()}
    assert node.evaluator.ended_by is None


CODECS = {
    "int8": ({"codec": "int8"}, 2e-2),
    "a mask": ({"codec": "topk:4/8,mask"}, 0.5),
    "one of two": ({"codec": "int4 | int8"}, 5e-2),
    "a subspace": ({"codec": "subspace:3+raw,raw"}, 1e-6),
    "samples": ({"codec": "aqsgd4,fp32", "samples": 16, **FIXED}, 2e-2),
    "stages left out": ({"policy": "skip:3", "stages": 4}, 1e-6),
    "stages swapped": ({"policy": "swap", "stages": 4}, 1e-6),
    "late gradients": (
        {"asynchronous": Asynchronous(3), "server": ServerTerms(lease_s=8.0, staleness=2)},
        1e-6,
    ),
}


@pytest.mark.parametrize("case", cases(CODECS, "a subspace", "samples", "stages left out"))
def test_whatever_the_edges_and_paths_the_whole_model_is_measured(case):
    options, close = case
    who = parts(options.get("stages", 3), 1, 1)
    one = evaluated(who, steps=4, **options)
    one.run()
    value = one.sim.nodes[0].evaluator.newest
    assert value.outcome == "ok"
    assert value.loss == pytest.approx(joined_loss(one).mean, rel=close)


def dying(one, stage, count, away_s):
    """Kill the server of a stage when it has been asked to measure for the `count`-th time."""
    asked, killed = [], asyncio.Event()

    def refusal(number, admit, request, sizes, *, known):
        if isinstance(request, Measure):
            asked.append(number)
            if len(asked) == count:
                killed.number = number
                killed.set()
        return admit(request, sizes, known=known)

    def watched(number, node):
        look(number, node)
        for serving in node.servings:
            if serving.index == stage and not killed.is_set():
                passes = serving.server.passes
                passes.refusal = partial(refusal, number, passes.refusal)

    look, one.watch = one.watch, watched

    async def kill(sim):
        await killed.wait()
        sim.kill(killed.number, away_s)

    return kill


@pytest.mark.parametrize("away_s", [None, pytest.param(4.0, marks=pytest.mark.long)])
def test_a_server_that_dies_while_it_measures_costs_nothing_where_there_is_another(away_s):
    one = evaluated(parts(3, 2, 1), steps=10)
    one.run(dying(one, 1, 3, away_s)).check().check_finished()
    first = told(one)[0]
    assert one.tale.kills == 1
    assert any(value.outcome == "ok" for value in first.values())
    wanted = joined_loss(one).mean
    for value in first.values():
        assert value.outcome != "ok" or value.loss == pytest.approx(wanted, rel=1e-6)


@pytest.mark.long
def test_the_only_server_of_a_stage_that_dies_costs_no_more_than_a_value():
    one = evaluated(parts(3, 1, 1), steps=12)
    one.begun_anew = True
    one.run(dying(one, 1, 3, 3.0)).check()
    values = told(one)[0].values()
    assert {value.outcome for value in values} <= {"ok", "missed"}
    assert any(value.outcome == "ok" for value in values)


def test_members_without_the_held_out_text_say_so():
    one = evaluated(BOTH, steps=3, measured_on=None).run().check()
    node = one.sim.nodes[0]
    assert {value.outcome for value in told(one)[0].values()} == {"missed"}
    assert node.evaluator.newest is None
    assert "not here yet" in node.evaluator.measuring.unable
    with pytest.raises(BadData, match="too few"):
        node.evaluates_on(TEXT[:4], one.plan)
    assert not any(
        node.serving.server.served["measured"] for node in one.sim.nodes.values() if node.serving
    )


def test_weights_that_are_not_finite_are_said_and_the_guard_warns():
    one = evaluated(BOTH, steps=10**4, every=1)

    def is_measured(sim):
        """No round to measure is left: one that is decided now is measured with what comes next."""
        return sim.nodes[0].peer.rounds.newest("grad/0") in {number for number, _ in told(one)[0]}

    async def spoil(sim):
        while len(sim.nodes) < 3 or not told(one)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        while is_measured(sim):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        stage = sim.nodes[1].serving.server.stage
        with torch.no_grad():
            for weight in stage.model.parameters():
                weight.fill_(math.nan)
        known = sim.nodes[0].evaluator
        async with asyncio.timeout(200.0):
            while known.alarm is None:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        sim.end()

    one.run(spoil)
    alarm = one.sim.nodes[0].evaluator.alarm
    assert alarm.kind == "not finite"
    assert one.sim.nodes[0].evaluator.ended_by is None
    assert [fields["does"] for fields in one.tale.fields("guard")][:1] == ["warn"]


def test_a_run_without_evaluations_has_no_evaluator_and_asks_for_no_text():
    one = evaluated(BOTH, steps=2, every=0).run()
    node = one.sim.nodes[0]
    assert node.evaluator is None
    node.evaluates_on(HELD_OUT, one.plan)
    assert not node.peer.evaluations.known
    assert MODEL.layers == 4
