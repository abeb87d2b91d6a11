"""Evaluation in whole simulated pipelines: what drawn members measure is the loss of the joined
model, all members know the same values, and no gradient and no account is another for it."""

import asyncio
import itertools
import math

import pytest
import torch
from worlds import pipeline_audit
from worlds.pipeline_audit import MODEL, STILL, TOKENS, Audit
from worlds.waiting import until

from farflock.node.model.data import evaluation_rows
from farflock.node.model.evaluation import HeldOut, measure
from farflock.node.model.llama import build
from farflock.node.pipeline import evaluation
from farflock.node.pipeline.passes.requests import HeldOutForward
from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PeerRole, PipelineWorld, parts
from farflock.optimizers.parts.stateful import evaluated_weights
from farflock.swarm.protocol.evaluation_progress import ENDED
from farflock.swarm.roles import EVERY

pytestmark = pytest.mark.usefixtures("quiet_log")
SEQUENCES, STEP, BYTES = 6, 8 * TOKENS, 2
ROWS = evaluation_rows(
    torch.arange(200).mul(7).remainder(13).numpy().astype("uint16"), TOKENS, SEQUENCES
)
HELD_OUT = HeldOut(ROWS, torch.full((MODEL.vocab_size,), BYTES).numpy())
LONG = HeldOut(ROWS.repeat(7, axis=0))
FIXED = {"policy": "fixed", "trainer": TrainerTerms(2, 64, 4.0, 6.0)}
INTERVAL = 2  # rounds
BOTH = (PeerRole(0, trains=True), PeerRole(1), PeerRole(2))


def evaluated(who, steps=6, rate=STILL, every=INTERVAL, **options):
    """An audit of a run that is evaluated; `options` are the pipeline's, and the run's."""
    stages, seed = options.pop("stages", 3), options.pop("seed", 0)
    names = ("batch", "samples", "dtype", "method", "options")
    terms = {name: options.pop(name) for name in names if name in options}
    plan = pipeline_audit.plan(seed, steps * STEP, rate=rate, **terms)
    world = PipelineWorld(who, plan.schedule.total_tokens, view_s=2.0, limit_s=600.0)
    one = Audit(plan, pipeline_audit.pipeline(stages, **options), world)
    one.evaluations = (every, HELD_OUT) if every else None
    return one


def joined_loss(one):
    """The held-out loss of the model that the servers' stages make up at the end."""
    model = build(one.plan.model, one.plan.run_seed).double()
    state = {}
    for node in one.sim.nodes.values():
        for serving in node.servings:
            driver = serving.loop.driver
            own = dict(serving.server.stage.model.named_parameters())
            is_summed = one.plan.method == "ddp"
            state |= own if is_summed else evaluated_weights(driver.method, driver.replica)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(state[name])
    return measure(model, HELD_OUT.rows, HELD_OUT.lengths)


def first_loss(one):
    """The held-out loss of the weights that the run begins with."""
    model = build(one.plan.model, one.plan.run_seed).double()
    return measure(model, HELD_OUT.rows).estimate.mean


def told(one):
    """What each node knows at the end."""
    return [dict(node.peer.evaluations.known) for node in one.sim.nodes.values()]


def newest(one):
    return one.sim.nodes[0].watch.newest[1]


ROLES = {
    "servers of which one trains": BOTH,
    "servers and a trainer": parts(3, 1, 1),
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


@pytest.mark.parametrize("who", cases(ROLES, "servers of which one trains"))
def test_members_measure_the_loss_of_the_joined_model_and_all_know_the_same_values(who):
    one = evaluated(who).run().check().check_finished()
    first, *others = told(one)
    assert all(known == first for known in others)
    rounds = [number for number, _ in first]
    assert rounds == list(range(0, len(rounds) * INTERVAL, INTERVAL)), "one is missed, or repeated"
    assert len(rounds) >= 2
    assert all(node.evaluates for node in one.sim.nodes.values()), "whoever is drawn has the text"
    wanted = joined_loss(one)
    for (number, peer), value in first.items():
        assert peer in one.sim.nodes[0].peer.evaluations.drawn(number)
        assert value.loss == pytest.approx(wanted.estimate.mean, rel=1e-6)
        assert value.standard_error == pytest.approx(wanted.estimate.standard_error, rel=1e-5)
        assert value.bits_per_byte == pytest.approx(value.loss / math.log(2) / BYTES, rel=1e-6)
        assert value.tokens <= one.plan.schedule.total_tokens
    reported = one.tale.fields("evaluation")
    assert len(reported) == len(first) * len(who)
    assert not any(node.watch.difference for node in one.sim.nodes.values())


def test_each_stage_has_merged_and_kept_what_it_has_without_evaluations():
    found = {}
    for every in (False, True):
        one = evaluated(BOTH, steps=3, every=int(every))
        one.run().check().check_finished().check_memory()
        servers = [node.serving.server for node in one.sim.nodes.values()]
        assert [bool(server.served["measure"]) for server in servers] == [every] * 3
        assert all((node.watch is None) is not every for node in one.sim.nodes.values())
        assert not any(node.peer.calls.left for node in one.sim.nodes.values())
        found[every] = [
            {name: x.tolist() for name, x in server.stage.model.named_parameters()}
            for server in servers
        ]
        merged = {key for keys in one.named[0].values() for key in keys}
        assert len(merged) >= 3 * 8
        assert all(len(keys) == 8 for keys in one.named[0].values())
    assert found[0] == found[1]


@pytest.mark.ci_more
def test_the_loss_falls_while_the_run_trains():
    one = evaluated(parts(3, 1, 1), steps=12, rate=0.5, every=4).run()
    losses = [value.loss for value in told(one)[0].values()]
    assert len(losses) >= 3
    assert losses[-1] < losses[0] - 0.05


def test_a_founder_that_trains_measures_the_weights_that_the_run_begins_with():
    one = evaluated(BOTH, steps=3, rate=0.5)
    one.evaluations, before = (10**6, HeldOut(ROWS.repeat(4, axis=0))), first_loss(one)
    one.run()
    assert newest(one).loss == pytest.approx(before, rel=1e-6)
    assert joined_loss(one).estimate.mean < before - 0.05


async def never():
    await asyncio.Event().wait()


async def at_once():
    pass


@pytest.mark.parametrize(("measures", "least_s"), [(never, 30.0), (at_once, 0.0)])
def test_it_trains_once_the_measurement_stands_still_or_is_given_up(measures, least_s, monkeypatch):
    monkeypatch.setattr(evaluation, "STALLED_S", 30.0)
    one, begun = evaluated(BOTH, steps=10**4), []

    def watching(number, node, made=one.watch):
        made(number, node)
        node.evaluator.meter.measure = lambda moved: measures()

    async def is_begun(sim):
        await until(lambda: len(sim.nodes) == 3 and sim.nodes[0].trainer.source.begun)
        begun.append(asyncio.get_running_loop().time())
        sim.end()

    one.watch = watching
    one.run(is_begun)
    assert least_s <= begun[0] <= least_s + 10.0


def test_training_goes_on_while_a_long_evaluation_is_under_way():
    one, found = evaluated(parts(3, 1, 1), steps=10**4), []
    one.evaluations = 10**6, LONG

    async def counted(sim):
        await until(lambda: len(sim.nodes) == 4)
        served = lambda: sim.nodes[0].serving.server.served  # noqa: E731
        for passes in (2, 38):
            await until(lambda passes=passes: served()["measure"] >= passes)
            found.append(served()["backward"])
        await until(lambda: told(one)[0])
        sim.end()

    one.run(counted)
    assert found[1] - found[0] >= 12
    assert newest(one).round == 0


def test_one_that_outlasts_many_rounds_is_made_once_and_keeps_others_from_beginning():
    one = evaluated(parts(3, 1, 2), steps=14)
    long = HeldOut(ROWS.repeat(5, axis=0))
    one.evaluations, made, said = (1, long), one.watch, []

    def listening(number, node):
        made(number, node)
        say = node.peer.evaluations.say_progress

        def heard(round_number, percent):
            said.append((asyncio.get_running_loop().time(), number, round_number, percent))
            say(round_number, percent)

        node.peer.evaluations.say_progress = heard

    one.watch = listening
    one.run().check()
    begins = [(at, who, number) for at, who, number, percent in said if percent == 0]
    ends = [(at, who, number) for at, who, number, percent in said if percent == ENDED]
    assert len(ends) >= 3
    assert len({who for _, who, _ in begins}) > 1, "another one is drawn in between"
    for (ended_s, who, number), (begun_s, *_) in zip(ends, begins[1:], strict=False):
        assert begun_s >= ended_s, f"another began while peer {who} measured round {number}"
    rounds = [number for _, _, number in begins]
    assert min(late - early for early, late in itertools.pairwise(rounds)) >= 3
    assert sorted(number for number, _ in told(one)[0])[:3] == rounds[:3], "none is lost"


def test_of_a_method_with_outer_parameters_these_are_measured_and_no_inner_steps():
    """While it is measured, servers take inner steps, and no outer one."""
    options = {"period": 99, "codec": "fp32", "return_codec": "fp32"}
    one = evaluated(parts(3, 1, 1), steps=10**4, rate=0.5, method="diloco", options=options)
    one.evaluations = 10**6, LONG
    one.weights_of = lambda life: {}  # between rounds servers differ, as the method wants
    before, taken = first_loss(one), []

    async def is_told(sim):
        await until(lambda: len(sim.nodes) == 4 and told(one)[0])
        taken.append(sim.nodes[0].step)
        sim.end()

    one.run(is_told)
    assert taken[0] >= 1
    assert told(one)[0].popitem()[1].loss == pytest.approx(before, rel=1e-6)


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


@pytest.mark.parametrize("case", cases(CODECS, "samples"))
def test_whatever_the_edges_and_paths_the_whole_model_is_measured(case):
    options, close = case
    one = evaluated(parts(options.get("stages", 3), 1, 1), steps=3, **options)
    one.run()
    assert newest(one).loss == pytest.approx(joined_loss(one).estimate.mean, rel=close)


def dying(one, stage, count, away_s):
    """Kill the server of a stage when it has been asked to measure for the `count`-th time."""
    asked, victims = [], []

    def watching(number, node):
        for serving in node.servings:
            admit = serving.server.passes.refusal

            def refusal(request, sizes, *, known, admit=admit, serving=serving):
                if isinstance(request, HeldOutForward) and serving.index == stage:
                    asked.append(number)
                    if len(asked) == count:
                        victims.append(number)
                return admit(request, sizes, known=known)

            serving.server.passes.refusal = refusal

    made = one.watch
    one.watch = lambda number, node: (made(number, node), watching(number, node))

    async def during(sim):
        await until(lambda: victims)
        sim.kill(victims[0], away_s)
        await asyncio.sleep(0)

    return during


def test_another_server_measures_if_one_dies_in_the_middle():
    one = evaluated(parts(3, 2, 1), steps=5)
    one.run(dying(one, 1, 2, None)).check()
    assert one.tale.kills == 1
    wanted = joined_loss(one).estimate.mean
    values = told(one)[0]
    assert (0, next(iter(values))[1]) in values, "the one in whose middle it died"
    assert all(value.loss == pytest.approx(wanted, rel=1e-6) for value in values.values())


@pytest.mark.long
def test_the_only_server_of_a_stage_that_dies_costs_no_more_than_a_value():
    one = evaluated(parts(3, 1, 1), steps=12)
    one.begun_anew = True
    one.run(dying(one, 1, 3, 3.0)).check()
    assert told(one)[0]


def test_weights_that_are_not_finite_are_said():
    one = evaluated(BOTH)
    made = one.watch

    def spoilt(number, node):
        made(number, node)
        if number == 1:
            with torch.no_grad():
                for weight in node.serving.server.stage.model.parameters():
                    weight.fill_(math.nan)

    async def is_told(sim):
        await until(lambda: len(sim.nodes) == 3 and all(told(one)))
        sim.end()

    one.watch = spoilt
    one.run(is_told)
    assert newest(one).loss is None
