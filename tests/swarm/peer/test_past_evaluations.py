"""Evaluations from before a peer came: learnt from what most members say, and from nobody else."""

from types import SimpleNamespace

import pytest
from worlds.herd import STREAM, in_virtual_time
from worlds.waiting import until

from farflock.swarm.messages import MAX_EVALUATIONS, Evaluated, Evaluation
from farflock.swarm.peer.evaluations import ANSWERS_WITHIN_S, ASKED, PastEvaluations, agreed
from farflock.swarm.protocol.evaluation_lot import EvaluationSchedule

SCHEDULE = EvaluationSchedule(STREAM, 7, every=4)


def value(number, loss=2.5):
    return Evaluation(number, 640, loss, 0.1, 3.6)


def answer(*said, sample=""):
    return Evaluated(tuple(said), sample, answers=True)


ONE, TWO, LIE = ("a", value(4)), ("b", value(8)), ("a", value(4, loss=0.1))


@pytest.mark.parametrize(
    ("answers", "values"),
    [
        ([answer(ONE, TWO)], (ONE, TWO)),
        ([answer(TWO), answer(TWO, ONE)], (TWO,)),
        ([answer(LIE), answer(ONE, TWO), answer(TWO, ONE)], (ONE, TWO)),
        ([answer(LIE), answer(ONE)], ()),
        ([answer(LIE, LIE, LIE), answer(), answer()], ()),
        ([answer(), answer()], ()),
    ],
    ids=["one", "more than half", "a liar of three", "a liar of two", "repeated", "none"],
)
def test_what_more_than_half_of_the_answers_say_counts_in_the_order_of_rounds(answers, values):
    assert agreed(answers).evaluations == values


def test_a_sample_counts_if_most_have_it_too():
    texts = ["the king", "the king", "a lie"]
    assert agreed([answer(sample=text) for text in texts]).sample == "the king"
    assert agreed([answer(sample=text) for text in texts[1:]]).sample == ""


async def evaluated(herd, count, schedule=SCHEDULE):
    """Let all members know `count` values, each of the member that the schedule drew."""
    nodes = list(herd.nodes.values())
    for node in nodes:
        node.peer.evaluations.open(schedule)
    await until(lambda: not any(node.peer.evaluations.is_learning for node in nodes), 30, "no past")
    await until(lambda: min(node.applied for node in nodes) >= 4 * count, 200, "the rounds")
    chain, values = nodes[0].peer.context.views, {}
    for number in range(0, 4 * count, 4):
        (member, *_) = schedule.drawn(chain, number)
        values[number, member] = value(number)
        for node in nodes:
            node.peer.context.evaluated(STREAM, member, value(number))
    assert all(dict(node.peer.evaluations.known) == values for node in nodes)
    return values


async def joined(herd, number):
    """Start a node that takes part in evaluations, and wait until it has asked."""
    node = herd.start(number)
    node.peer.evaluations.open(SCHEDULE)
    await until(lambda: not node.peer.evaluations.is_learning, 60, "the past")
    return node


@in_virtual_time(3)
async def test_a_joiner_learns_the_values_from_before_it_came_as_new_ones_of_its_own(herd):
    values = await evaluated(herd, 3)
    node = await joined(herd, 3)
    assert dict(node.peer.evaluations.known) == values
    assert list(node.peer.evaluations.fresh) == sorted(values)
    again = await joined(herd, 4)
    assert dict(again.peer.evaluations.known) == values, "it can be asked itself"


class Question:
    """The question of a member for past values, and the time; `sent` are those asked."""

    def __init__(self, others, away=()):
        self.now_s, self.sent, self.dropped, away = 0.0, [], [], set(away)
        newest = SimpleNamespace(peers=("senior", *others, "me"))
        context = SimpleNamespace(
            me="me",
            is_member=True,
            views=SimpleNamespace(newest=newest),
            life=lambda peer: "suspect" if peer in away else "alive",
            send=lambda peer, message: self.sent.append(peer),
            now=lambda: self.now_s,
            drop=self.dropped.append,
        )
        self.past, self.context = PastEvaluations(context), context

    def tick(self, *, may_ask=True):
        return self.past.tick(may_ask=may_ask)


def test_the_most_senior_members_that_are_alive_are_asked_once_a_peer_is_a_member():
    asking = Question([f"peer{number}" for number in range(8)], away=["peer0"])
    asking.context.is_member = False
    assert asking.tick() is None
    assert not asking.sent
    asking.context.is_member = True
    assert asking.tick(may_ask=False) is None
    assert not asking.sent, "it does not know yet how far the run is"
    assert asking.tick() is None
    assert asking.sent == ["senior", "peer1", "peer2", "peer3", "peer4"]
    assert len(asking.sent) == ASKED


def test_an_answer_that_does_not_come_is_waited_for_and_then_left_out():
    asking = Question(["other"])
    asking.tick()
    asking.past.receive("senior", answer(ONE))
    assert asking.tick() is None
    asking.now_s = ANSWERS_WITHIN_S
    assert asking.tick().evaluations == (ONE,)
    assert asking.past.is_over
    asking.past.receive("other", answer(LIE))
    assert (asking.tick(), len(asking.dropped)) == (None, 1)


def test_if_nobody_answers_members_are_asked_again():
    asking = Question(["other"])
    for turn in range(3):
        asking.now_s = turn * ANSWERS_WITHIN_S
        asking.tick()  # asks, or gives up
        asking.tick()
    assert asking.sent == ["senior", "other"] * 3
    assert not asking.past.is_over


def test_of_two_answers_of_one_member_the_first_counts_and_nobody_answers_unasked():
    asking = Question(["other"])
    asking.tick()
    for sender, said in (("senior", ONE), ("senior", LIE), ("stranger", LIE), ("other", ONE)):
        asking.past.receive(sender, answer(said))
    assert asking.tick().evaluations == (ONE,)
    assert len(asking.dropped) == 2


@in_virtual_time(3)
async def test_values_of_members_that_were_not_drawn_are_not_believed_whoever_says_them(herd):
    values = await evaluated(herd, 5, EvaluationSchedule(STREAM, 8, every=4))
    node = await joined(herd, 3)
    chain, known = node.peer.context.views, dict(node.peer.evaluations.known)
    true = {place: values[place] for place in values if place[1] in SCHEDULE.drawn(chain, place[0])}
    assert known == true
    assert len(known) < len(values)


@in_virtual_time(3)
async def test_answers_of_members_that_were_not_asked_or_second_ones_are_dropped(herd):
    await evaluated(herd, 1)
    node = herd.nodes[0]
    (place,) = node.peer.evaluations.known
    for sender in herd.nodes.values():
        lie = answer((sender.id, value(4)))
        node.peer.evaluations.receive(sender.id, sender.incarnation, lie)
    assert list(node.peer.evaluations.known) == [place]
    assert node.peer.context.counters["dropped: evaluations that were not asked for"] == 3


@in_virtual_time(1)
async def test_a_lone_founder_has_nothing_to_learn(herd):
    (node,) = herd.nodes.values()
    node.peer.evaluations.open(SCHEDULE)
    assert node.peer.evaluations.is_learning
    await until(lambda: not node.peer.evaluations.is_learning, 1, "the first look")


@in_virtual_time(1)
async def test_among_pairs_nobody_learns_the_values_of_others(herd):
    (node,) = herd.nodes.values()
    node.peer.evaluations.open(SCHEDULE, shared=False)
    assert not node.peer.evaluations.is_learning
    node.peer.evaluations.receive("other", 1, answer(ONE))
    assert not node.peer.evaluations.known


def test_few_members_are_asked_for_little():
    assert ASKED * MAX_EVALUATIONS * 140 < 200_000  # bytes
