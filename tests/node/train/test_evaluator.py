"""Evaluation in whole simulated runs: all members have the same values, and the guard ends the run
at the same round at all."""

import dataclasses
import logging
import math

import msgspec
import pytest
import torch
from worlds.card import OutOfMemory

from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.device import Device, choose
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import PRESETS, build
from farflock.node.model.lora import LoraTerms, add_adapters
from farflock.node.run.evaluation_section import EvaluationSection, GuardSection
from farflock.node.run.terms import RunPlan
from farflock.node.simulate import simulation
from farflock.node.simulate.simulation import World, simulate
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.train.evaluator import DELAY, TOLERANCE, HeldOutMeter, Pace, meter_of
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.peer.evaluations import KEPT, drawn
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

TOKENS, LR, SGD_LR, EVERY = 6_000, 1e-2, 0.3, 2


@pytest.fixture(scope="module")
def texts():
    torch.set_num_threads(1)
    corpus, tokenizer = load_corpus("shakespeare"), ByteTokenizer()
    return tokenizer.encode(corpus.train[:100_000]), tokenizer.encode(corpus.held_out)


@dataclasses.dataclass(frozen=True, slots=True)
class HotSchedule(Schedule):
    """A rate that is many times too high from some tokens on."""

    hot_after: int = 0
    times: int = 100

    def rate(self, tokens, steps):
        return SGD_LR * (self.times if tokens >= self.hot_after else 1)


@dataclasses.dataclass
class Run:
    """A simulated run, and the nodes that took part."""

    plan: RunPlan
    outcome: simulation.SimulationResult
    nodes: list

    def known(self):
        return [dict(node.peer.evaluations.known) for node in self.nodes]

    def hashes(self):
        return {state_hash(state) for state in self.outcome.states.values()}


@pytest.fixture
def run(texts, monkeypatch):
    """A function that simulates three peers; `hot` are those whose rate gets too high."""

    def simulated(
        method="diloco",
        *,
        guard="warn",
        hot=(),
        total=TOKENS,
        loss=0.0,
        every=EVERY,
        text=texts[1],
        peers=3,
        times=100,
    ):
        nodes = []
        assemble = simulation.replica_node

        def replica_node(plan, peer, *given, **options):
            node = assemble(plan, peer, *given, **options)
            if hot:
                after = total // 3 if len(nodes) in hot else total
                schedule = HotSchedule(SGD_LR, total, 0, 0.1, 0, after, times)
                node.training_task.schedule = schedule
            nodes.append(node)
            return node

        monkeypatch.setattr(simulation, "replica_node", replica_node)
        options = {"codec": "fp16", "deadline_s": 8.0}
        options |= {"period": 4} if method in ("noloco", "diloco") else {}
        terms = InnerConfig("sgd" if hot else "adamw", LR), Schedule(LR, total), method, options
        plan = RunPlan(
            *(1, PRESETS["tiny"], *terms),
            batch=2,
            seq=32,
            clip_norm=1.0,
            evaluation=EvaluationSection(every, 16),
            guard=GuardSection(guard),
        )
        world = World(peers, total, LinkModel(loss=loss), view_s=3.0)
        return Run(plan, simulate(plan, world, texts[0], measured_on=text), nodes)

    return simulated


@pytest.mark.parametrize("method", ["diloco", "ddp", "noloco", "sparta"])
def test_every_evaluation_is_accepted_by_all_and_equal_at_all(run, method):
    found = run(method, every=10 if method in ("ddp", "sparta") else EVERY)
    first, *others = found.known()
    if method != "noloco":  # whose peers count their own rounds, and end at their own ones
        assert all(known == first for known in others)
    measured = [each for each in first.values() if each.outcome == "ok"]
    # a pair's rounds may be numbered past one that is due
    assert len(measured) >= 3
    assert len(measured) == len(first) or method == "noloco"
    assert all(each.sequences == 16 for each in measured)
    losses = [each.loss for each in measured if each.place == 0]
    assert losses[-1] < losses[0] < 6.0
    assert not found.outcome.alarm
    assert found.nodes[0].evaluator.alarm is None


def test_the_member_that_evaluates_is_the_one_that_was_drawn(run):
    found = run()
    peers = [node.peer.me for node in found.nodes]
    views = found.nodes[0].peer.context.views
    for each in found.outcome.evaluations:
        members = drawn(found.plan.run_seed, views.at(each.round), each.round)
        assert peers[each.by] == members[each.repeated].peer
    assert len({each.by for each in found.outcome.evaluations}) > 1


def test_the_last_value_is_that_of_the_weights_after_its_round(run, texts):
    found = run(total=2_000, every=1, peers=1)
    node = found.nodes[0]
    newest = node.evaluator.newest
    assert newest is not None
    assert newest.round == node.evaluator.applied
    model = build(found.plan.model, 1)
    weights = node.loop.driver.method.eval_params(node.loop.driver.replica)
    model.load_state_dict(dict(weights), strict=False)
    measured = evaluate(model, *evaluation(texts[1], 32, 16))
    assert measured.mean == pytest.approx(newest.loss, abs=1e-6)


def test_training_does_not_see_the_evaluation(run):
    once = run(every=EVERY, peers=1, total=2_000)
    other = run(every=0, peers=1, total=2_000)
    assert other.nodes[0].evaluator is None
    assert not other.outcome.evaluations
    assert len(once.outcome.evaluations) >= 3
    assert once.hashes() == other.hashes()


def test_values_reach_all_over_a_network_that_loses_messages(run):
    found = run(loss=0.2)
    first, *others = found.known()
    settled = {place for place in first if place[0] < found.nodes[0].evaluator.applied - 2 * EVERY}
    assert len(settled) >= 2
    for known in others:
        assert settled <= known.keys()
        assert all(known[place] == first[place] for place in settled)


@pytest.mark.parametrize(
    ("method", "hot", "every", "loss"),
    [
        ("diloco", (1,), 1, 0.0),
        ("diloco", (0, 1, 2), 1, 0.0),
        ("diloco", (0, 1, 2), 1, 0.2),
        ("ddp", (0, 1, 2), 3, 0.0),
    ],
    ids=["at one of three", "at all", "with lost messages", "at all that take the same steps"],
)
def test_a_rate_a_hundred_times_too_high_ends_the_run_at_the_same_round_at_all(
    run, method, hot, every, loss
):
    found = run(method, guard="end", hot=hot, every=every, total=2 * TOKENS, loss=loss)
    ends = [node.evaluator.ended_by for node in found.nodes]
    assert ends[0] is not None
    assert ends[0] == ends[1] == ends[2]
    assert found.outcome.alarm == ends[0].reason
    assert len(found.hashes()) == 1
    applied = {node.evaluator.applied for node in found.nodes}
    assert applied == {ends[0].round + DELAY * every - 1}
    assert all(node.tokens < 2 * TOKENS for node in found.nodes)
    assert ends[0].good is not None
    assert ends[0].good < ends[0].round


def test_the_guard_only_warns_unless_it_is_to_end_the_run(run, caplog):
    caplog.set_level(logging.WARNING, "farflock")
    # few enough times that a run that goes on keeps finite gradients
    found = run("ddp", guard="warn", hot=(0, 1, 2), every=3, times=40)
    assert any(node.tokens >= TOKENS for node in found.nodes)
    assert not found.outcome.alarm
    said = [record for record in caplog.records if "may have gone wrong" in record.getMessage()]
    assert len(said) >= 3
    assert "it goes on" in said[0].getMessage()
    caplog.clear()
    run("ddp", guard="off", hot=(0, 1, 2), every=3, times=40)
    assert "may have gone wrong" not in caplog.text


def test_members_without_the_held_out_text_say_that_they_cannot(run):
    found = run(text=None)
    assert {each.outcome for each in found.outcome.evaluations} == {"missed"}
    assert found.nodes[0].evaluator.newest is None


def test_an_untrue_repetition_is_said_with_both_names(run, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "farflock")
    from farflock.node.train import evaluator

    say = evaluator.Evaluations.say

    def lying(self, number, place, value):
        if place == 1:
            value = msgspec.structs.replace(value, loss=value.loss * 1.01)
        say(self, number, place, value)

    monkeypatch.setattr(evaluator.Evaluations, "say", lying)
    found = run("ddp", every=1, total=4_000)
    (first, second) = [found.nodes[0].peer.evaluations.signer((10, place)) for place in (0, 1)]
    text = next(r.getMessage() for r in caplog.records if "after round 10" in r.getMessage())
    assert first in text
    assert found.nodes[0].evaluator.difference in caplog.text
    assert second in text
    assert first != second


def test_a_meter_leaves_the_model_as_it_is(texts):
    model = build(PRESETS["tiny"], 1)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    weights = {name: x.detach() + 0.01 for name, x in model.named_parameters()}
    windows = evaluation(texts[1], 32, 10)
    measured = meter_of(model, Device(), windows, lambda: 4).measure(weights)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    other = build(PRESETS["tiny"], 1)
    other.load_state_dict(weights, strict=False)
    assert measured.mean == pytest.approx(evaluate(other, *windows).mean, abs=1e-6)
    assert measured.sequences == 10


def test_a_meter_of_adapters_measures_them_beside_the_frozen_weights(texts):
    model, windows = build(PRESETS["tiny"], 1), evaluation(texts[1], 32, 10)
    add_adapters(model, LoraTerms(r=2, alpha=4.0), 3)
    trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    weights = {name: torch.full_like(x, 0.1) for name, x in trained}
    found = meter_of(model, Device(), windows, lambda: 4).measure(weights)
    assert all(not torch.equal(x, weights[name]) for name, x in trained)
    before = evaluate(model, *windows)
    model.load_state_dict(weights, strict=False)
    assert found.mean == pytest.approx(evaluate(model, *windows).mean, abs=1e-6)
    assert abs(found.mean - before.mean) > 1e-3


@pytest.mark.usefixtures("card")
def test_a_meter_on_an_accelerator_measures_what_the_cpu_does(texts):
    windows = evaluation(texts[1], 32, 10)
    there = build(PRESETS["tiny"], 1).to("card")
    weights = {name: x.detach().cpu() for name, x in there.named_parameters()}
    device = choose("card")
    measured = meter_of(there, device, windows, lambda: 4).measure(weights)
    here = evaluate(build(PRESETS["tiny"], 1), *windows)
    assert measured.mean == pytest.approx(here.mean, rel=TOLERANCE / 10)


def test_without_room_on_the_device_a_drawn_member_says_that_it_missed(run, monkeypatch):
    def measure(self, weights):
        raise OutOfMemory("card out of memory: tried to allocate 1 byte, 0 are free")

    monkeypatch.setattr(HeldOutMeter, "measure", measure)
    found = run(total=2_000)
    assert {each.outcome for each in found.outcome.evaluations} == {"missed"}


def test_a_pace_counts_the_time_in_steps():
    time_s = [0.0]

    async def train(work):
        time_s[0] += 2.0
        return work()

    async def main():
        pace = Pace(train, lambda: time_s[0])
        assert pace.since(0) == (None, None)
        assert await pace(lambda: 1.5) == 1.5
        time_s[0] += 6.0
        assert pace.since(400) == (50.0, 0.25)

    run_virtual(main())


def test_the_kept_rounds_are_enough_for_the_guard():
    assert KEPT > 32 + DELAY
    assert math.isfinite(KEPT)
