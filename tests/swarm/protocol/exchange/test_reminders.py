import pytest

from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.protocol.exchange.holdings import RESEND_S
from farflock.swarm.protocol.exchange.reminders import ANSWERS, Reminders


def answers(size, asker, times, now_s=RESEND_S):
    """How many of a group answer each of an asker's questions."""
    others = {member: Reminders(0.0) for member in range(size) if member != asker}
    return [
        sum(reminders.is_due(now_s, asker, member, size) for member, reminders in others.items())
        for _ in range(times)
    ]


def test_a_question_that_crossed_the_announcement_is_not_answered():
    assert answers(5, 1, 3, now_s=RESEND_S - 0.01) == [0, 0, 0]
    assert Reminders().is_due(0.0, 1, 0, 2), "it was learned from a log, and not announced"


@pytest.mark.parametrize("asker", [0, 3, 63])
def test_few_answer_at_first_and_all_in_the_end(asker):
    seen = answers(MAX_MEMBERS, asker, 7)
    assert seen == [ANSWERS, 4, 8, 16, 32, 63, 63]


@pytest.mark.parametrize("asker", [0, 1])
def test_in_a_pair_the_other_answers_at_once(asker):
    assert answers(2, asker, 2) == [1, 1]


def test_each_asker_is_counted_on_its_own():
    reminders = Reminders(0.0)
    assert [reminders.is_due(1.0, 1, 4, 9) for _ in range(2)] == [False, True]
    assert not reminders.is_due(1.0, 8, 4, 9)
