"""Evaluations of runs of whole models in virtual time: drawn members measure, all know the same
values, and a liar is seen whenever a second member was drawn."""

import asyncio
import collections
import logging
from types import SimpleNamespace

import pytest
import torch
from worlds.evaluated_run import evaluated
from worlds.waiting import until

from farflock.node.model.evaluation import LossEstimate
from farflock.node.train.evaluation_curve import CURVE
from farflock.node.train.evaluation_watch import EvaluationWatch, go_on
from farflock.node.train.evaluator import Measured, evaluation_of
from farflock.swarm.messages import Evaluation
from farflock.swarm.protocol import evaluation_lot


async def settled(run, count):
    """Wait until all nodes know of so many evaluated rounds."""
    await until(
        lambda: all(len({at for at, _ in node.known}) >= count for node in run.nodes),
        200,
        f"{count} evaluations",
    )
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("method", "options"),
    [("diloco", {}), ("ddp", {}), ("streaming", {"period": 6, "fragments": 2})],
)
def test_all_members_know_the_same_values_each_by_a_drawn_member(method, options):
    @evaluated(3, method, **options)
    async def main(run):
        await settled(run, 4)
        known = [node.known for node in run.nodes]
        rounds = set.intersection(*({at for at, _ in each} for each in known))
        assert len(rounds) >= 3
        for node in run.nodes[1:]:
            mine = {place: value for place, value in node.known.items() if place[0] in rounds}
            others = {p: v for p, v in run.nodes[0].known.items() if p[0] in rounds}
            assert mine == others
        for at, peer in run.nodes[0].known:
            assert peer in run.nodes[0].peer.evaluations.drawn(at)
        assert len({peer for _, peer in run.nodes[0].known}) > 1, "each has its turn"
        assert run.nodes[0].evaluations[0]["step"] >= 0
        assert all(node.peer.evaluations.sample == "a text" for node in run.nodes)

    main()


@evaluated(1)
async def test_the_weights_before_the_first_step_are_evaluated_and_known_with_round_0(run):
    (node,) = run.nodes
    await until(lambda: node.evaluations, 20, "the first value")
    assert node.meter.copies >= 1
    assert node.evaluations[0]["round"] == 0
    assert (node.evaluations[0]["loss"], node.evaluations[0]["tokens"]) == (1.0, 0)
    await until(lambda: len(node.evaluations) > 2, 60, "later ones")
    assert [each["round"] for each in node.evaluations[:3]] == [0, 4, 8]
    assert node.evaluator.watch.newest[1].round >= 8


def test_a_node_without_the_text_passes_its_turns_in_words_and_the_run_goes_on(caplog):
    @evaluated(2)
    async def main(run):
        waiting, other = run.nodes
        measured, waiting.meter.copy = waiting.meter.copy, lambda weights: None
        before = set(other.known)
        await asyncio.sleep(120)
        said = [record.getMessage() for record in caplog.records if "passes its turn" in record.msg]
        assert len(said) > 1
        assert {peer for _, peer in other.known.keys() - before} == {other.id}
        waiting.meter.copy = measured
        passed = set(other.known)
        await until(
            lambda: waiting.id in {peer for _, peer in other.known.keys() - passed}, 100, "its own"
        )

    main()


@evaluated(3, unable=(0, 2))
async def test_the_turns_of_members_that_cannot_evaluate_are_taken_by_those_that_can(run):
    able = run.nodes[1]
    await settled(run, 5)
    assert {peer for node in run.nodes for _, peer in node.known} == {able.id}
    numbers = sorted(number for number, _ in able.known)
    assert numbers == list(range(numbers[0], numbers[-1] + 1, run.every)), "there is no gap"
    assert [node.meter.copies for node in run.nodes if node is not able] == [0, 0]


def test_a_node_that_runs_out_of_memory_says_so_once_and_trains_on(caplog):
    @evaluated(1)
    async def main(run):
        (node,) = run.nodes
        await until(lambda: node.known, 20, "the first value")

        def full(weights):
            node.meter.copies += 1
            raise torch.OutOfMemoryError("no room")

        node.meter.copy, copies, before = full, node.meter.copies, node.loop.step
        await until(lambda: node.meter.copies >= copies + 3, 100, "three turns")
        assert node.loop.step > before
        said = [one for one in caplog.messages if "no room to evaluate the run" in one]
        assert len(said) == 1

    main()


def test_a_liar_is_seen_with_both_names_when_a_second_member_was_drawn(monkeypatch, caplog):
    monkeypatch.setattr(evaluation_lot, "REPEATED", 1)

    @evaluated(2)
    async def main(run):
        run.nodes[1].meter.lie = -2.0
        with caplog.at_level(logging.WARNING):
            await until(lambda: run.nodes[0].evaluator.watch.difference, 100, "the difference")
        said = run.nodes[0].evaluator.watch.difference
        assert all(node.id in said for node in run.nodes)
        assert said in caplog.messages
        await settled(run, 6)
        for node in run.nodes:
            told = collections.Counter(each["round"] for each in node.evaluations if each["round"])
            seen = {fields["round"] for _, kind, fields in node.events if kind == "difference"}
            assert seen == {number for number, values in told.items() if values == 2}
            assert len(seen) >= 4

    main()


def test_honest_members_differ_by_rounding_alone_and_nobody_says_a_word(monkeypatch):
    monkeypatch.setattr(evaluation_lot, "REPEATED", 1)

    @evaluated(2)
    async def main(run):
        run.nodes[1].meter.lie = 1e-5
        await settled(run, 4)
        pairs = [at for at, _ in run.nodes[0].known if at]
        assert len(pairs) > len(set(pairs)), "two measured"
        assert not any(node.evaluator.watch.difference for node in run.nodes)

    main()


@evaluated(4, "noloco", period=4)
async def test_among_pairs_each_knows_its_own_value_alone_and_says_so(run):
    await until(lambda: sum(len(node.known) for node in run.nodes) > 4, 200, "some values")
    for node in run.nodes:
        assert {peer for _, peer in node.known} <= {node.id}
        assert all(fields["own"] for fields in node.evaluations)


@evaluated(1)
async def test_an_evaluation_stops_with_its_run(run):
    (node,) = run.nodes
    await until(lambda: node.known, 20, "the first value")
    node.evaluator.is_over = lambda: True
    before, copies = max(node.known)[0], node.meter.copies
    await until(lambda: node.meter.copies >= copies + 3, 60, "three more, halted")
    assert max(node.known)[0] <= before + 4


@pytest.mark.parametrize("mean", [float("nan"), float("inf"), 1e7])
def test_a_loss_that_is_no_finite_number_is_said_to_be_none(mean):
    value = evaluation_of(3, 5, Measured(LossEstimate(mean, 0.1, 2), mean))
    assert (value.loss, value.bits_per_byte) == (None, None)


def test_the_standard_error_of_one_sequence_is_not_said():
    value = evaluation_of(3, 5, Measured(LossEstimate(2.0, float("inf"), 1), 1.0))
    assert (value.loss, value.standard_error, value.bits_per_byte) == (2.0, 0.0, 1.0)


@evaluated(2)
async def test_a_late_joiner_has_all_values_in_their_order_and_a_whole_curve(run):
    await settled(run, 4)
    before = run.nodes[0].known
    late = await run.add()
    await until(lambda: len(late.evaluations) > len(before), 60, "its records")
    assert {place: late.known[place] for place in before} == before
    rounds = [fields["round"] for fields in late.evaluations]
    assert rounds == sorted(rounds)
    assert rounds[0] == min(before)[0]
    assert late.evaluator.watch.curve.points[: len(before) - 1]


def test_after_a_restart_the_values_that_are_in_the_history_are_not_recorded_again():
    told, known = [], {(number, "a"): Evaluation(number, 64, 2.0, 0.1) for number in (0, 4, 8, 12)}
    evaluations = SimpleNamespace(
        known=known, fresh=collections.deque(known), drawn=lambda number: ("a",), is_learning=True
    )
    watch = EvaluationWatch(evaluations, lambda kind, fields: told.append(fields["round"]))
    curve = [[0, 64, 2.0, 0.1], [4, 64, 2.0, 0.1]]
    go_on(watch, {CURVE: curve})
    watch.look(9)
    assert not told, "it waits for what it learns"
    evaluations.is_learning = False
    watch.look(9)
    watch.look(9)
    assert told == [8, 12]
    assert [point.round for point in watch.curve.points] == [0, 4, 8, 12]
