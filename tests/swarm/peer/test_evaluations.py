"""Evaluations over whole peers: known to all with their round, and by drawn members alone."""

import pytest
from worlds.herd import STREAM, in_virtual_time
from worlds.waiting import until

from farflock.swarm.messages import MAX_EVALUATIONS, Evaluated, Evaluation
from farflock.swarm.protocol.evaluation_lot import EvaluationSchedule

EVERY = 4
KINDS = pytest.mark.parametrize("kind", ["mean", "gather"])


def opened(herd, every=EVERY):
    for node in herd.nodes.values():
        node.peer.evaluations.open(EvaluationSchedule(STREAM, 7, every))
    return [node.peer.evaluations for node in herd.nodes.values()]


def due(herd):
    """Return an evaluated round that is soon to come, and the nodes that are drawn for it."""
    number = (max(node.applied for node in herd.nodes.values()) // EVERY + 2) * EVERY
    schedule = EvaluationSchedule(STREAM, 7, EVERY)
    drawn = schedule.drawn(herd.nodes[0].peer.context.views, number)
    nodes = {node.id: node for node in herd.nodes.values()}
    return (
        number,
        [nodes[peer] for peer in drawn],
        [node for peer, node in nodes.items() if peer not in drawn],
    )


def value(number, loss=2.5):
    return Evaluation(number, 640, loss, 0.1, 3.6)


async def reached(herd, number):
    await until(
        lambda: min(node.applied for node in herd.nodes.values()) >= number, 60, "the round"
    )


@KINDS
def test_a_value_is_known_to_all_with_the_round_of_the_next_offer(kind):
    @in_virtual_time(3, kind=kind)
    async def main(herd):
        known = opened(herd)
        number, (first, *_), _ = due(herd)
        await reached(herd, number - 1)
        first.peer.evaluations.offer(value(number))
        await reached(herd, number + 3)
        assert [dict(each.known) for each in known] == [{(number, first.id): value(number)}] * 3
        assert [list(each.fresh) for each in known] == [[(number, first.id)]] * 3
        assert not first.peer.context.measured, "it is said once"

    main()


@in_virtual_time(3)
async def test_a_value_of_a_member_that_was_not_drawn_or_for_no_due_round_does_not_count(herd):
    known = opened(herd)
    number, _, (other, *_) = due(herd)
    await reached(herd, number - 1)
    other.peer.evaluations.offer(value(number))
    await reached(herd, number + 3)
    other.peer.evaluations.offer(value(number + 1))
    await reached(herd, number + 6)
    assert not any(each.known for each in known)
    for node in herd.nodes.values():
        assert node.peer.context.counters["dropped: evaluation by somebody else"]


@in_virtual_time(3)
async def test_a_drawn_member_cannot_push_out_values_with_rounds_that_have_not_begun(herd):
    (known, *_) = opened(herd)
    liar = herd.nodes[1]
    schedule = EvaluationSchedule(STREAM, 7, EVERY)
    views = liar.peer.context.views
    mine = [
        number for number in range(400, 8000, EVERY) if liar.id in schedule.drawn(views, number)
    ]
    for number in mine[: 2 * MAX_EVALUATIONS]:
        herd.nodes[0].peer.context.evaluated(STREAM, liar.id, value(number))
    assert not known.known


@in_virtual_time(3)
async def test_of_two_values_of_one_member_for_one_round_the_first_counts(herd):
    known = opened(herd)
    number, (first, *_), _ = due(herd)
    await reached(herd, number - 1)
    first.peer.evaluations.offer(value(number))
    await reached(herd, number + 2)
    first.peer.evaluations.offer(value(number, loss=0.1))
    await reached(herd, number + 5)
    assert {each.known[number, first.id].loss for each in known} == {2.5}


@in_virtual_time(3)
async def test_a_sample_comes_to_all_without_what_a_terminal_would_obey(herd):
    opened(herd)
    number, (first, *_), (other, *_) = due(herd)
    await reached(herd, number - 1)
    first.peer.evaluations.offer(value(number), "The king\x1b[2J\nspoke")
    other.peer.evaluations.offer(value(number), "I was not drawn")
    await reached(herd, number + 2)
    texts = {node.id: node.peer.evaluations.sample for node in herd.nodes.values()}
    del texts[other.id]
    assert set(texts.values()) == {"The king [2J spoke"}


@in_virtual_time(3)
async def test_a_visitor_gets_what_a_member_knows_and_hears_nobody_else(herd):
    for node in (herd.nodes[0], herd.nodes[1]):
        node.peer.evaluations.open(EvaluationSchedule(STREAM, 7, EVERY))
    number, (first, *_), _ = due(herd)
    await reached(herd, number - 1)
    first.peer.context.measured[STREAM] = value(number)
    await reached(herd, number + 2)
    asked, visitor = herd.nodes[0], herd.nodes[2].peer.evaluations
    assert not visitor.known, "it knows no schedule"
    visitor.look_on(asked.id)
    visitor.receive(herd.nodes[1].id, 1, Evaluated((("liar", value(9)),)))
    await until(lambda: visitor.known, 10, "the answer")
    assert dict(visitor.known) == {(number, first.id): value(number)}


@in_virtual_time(3)
async def test_a_trainers_word_counts_in_a_pipeline_alone(herd):
    (known, *_) = opened(herd)
    number, (first, *_), _ = due(herd)
    await reached(herd, number - 1)
    life = first.incarnation
    known.receive(first.id, life, Evaluated(((first.id, value(number)),)))
    assert not known.known, "here the close list says it"
    known.receive("stranger", life, Evaluated((("stranger", value(number)),)))
    assert herd.nodes[0].peer.context.counters["dropped: evaluation of a stranger"]


@in_virtual_time(3)
async def test_a_drawn_members_evaluation_is_known_to_be_under_way_until_it_ends(herd):
    opened(herd)
    number, (first, *_), (other, second, *_) = due(herd)
    await reached(herd, number - 1)
    known = other.peer.evaluations
    second.peer.evaluations.say_progress(number, 0)
    await until(lambda: other.peer.context.counters["dropped: evaluation by somebody else"], 10)
    assert not known.is_another_under_way(number + EVERY)
    first.peer.evaluations.say_progress(number, 0)
    await until(lambda: known.is_another_under_way(number + EVERY), 10, "the begin")
    assert not first.peer.evaluations.is_another_under_way(number + EVERY), "its own"
    first.peer.evaluations.say_progress(number, 100)
    await until(lambda: not known.is_another_under_way(number + EVERY), 10, "the end")
