"""Reports of holdings between two members: by difference, over links that lose and reorder."""

import itertools
import random

import pytest

from farflock.swarm.messages import MAX_CHANGES, Holds, Key
from farflock.swarm.protocol.exchange.holdings import (
    CONFIRM_S,
    MAX_COLLECT_S,
    RESEND_S,
    Holdings,
    collect_s,
)

KEY, VIEW = Key("weights", 3), bytes(32)


def change(place, name):
    return place, bytes([name]) * 8


DEADLINE_S = 100.0
COLLECT_S = collect_s(DEADLINE_S)


class Side:
    """One member of two, and what it knows of the other."""

    def __init__(self, me):
        self.me, self.other, self.changes, self.heard = me, 1 - me, [], {}
        self.holdings = Holdings(KEY, VIEW, [self.other], self.changes, 0.0, DEADLINE_S)

    def hear(self, message):
        fresh = self.holdings.hear(self.other, message)
        self.heard.update(fresh)
        return fresh

    def says(self, now_s, *, at_once=True, offers=()):
        return [m for _, m in self.holdings.reports(now_s, offers, at_once=at_once)]


@pytest.fixture
def sides():
    return Side(0), Side(1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_late_or_doubled_each_knows_what_the_other_holds_in_the_end(sides, seed):
    chance, now_s, on_the_way = random.Random(seed), 0.0, []
    for tick in range(600):
        now_s += 0.1
        for side in sides:
            if tick < 300 and chance.random() < 0.2:
                side.changes.append(change(chance.randrange(9), chance.randrange(250)))
            for message in side.says(now_s, at_once=chance.random() < 0.5):
                copies = chance.choice([0, 1, 1, 1, 2])
                on_the_way += [(now_s + chance.random(), side.other, message)] * copies
        for entry in [entry for entry in on_the_way if entry[0] <= now_s]:
            on_the_way.remove(entry)
            sides[entry[1]].hear(entry[2])
    for side in sides:
        assert side.heard == dict(sides[side.other].changes)


def test_news_goes_out_once_and_is_sent_again_only_until_it_is_confirmed(sides):
    a, b = sides
    a.changes += [change(0, 1), change(1, 2)]
    (said,) = a.says(0.1)
    assert a.says(0.2) == []
    assert a.says(0.1 + CONFIRM_S) == [said]
    assert b.hear(said) == [change(0, 1), change(1, 2)]
    (answer,) = b.says(0.7, offers=[0])
    assert (answer.changes, answer.known, answer.offered) == (b"", 2, True)
    assert a.hear(answer) == []
    assert a.holdings.offered == {1}
    a.changes.append(change(1, 3))
    (more,) = a.says(0.8)
    assert (more.first, len(more.changes)) == (2, 12)
    assert b.hear(said) == []
    assert b.hear(more) == [change(1, 3)]


def test_a_report_to_a_silent_member_is_repeated_less_and_less_often(sides):
    a, _ = sides
    a.changes.append(change(0, 1))
    sent = [(tick, said) for tick in range(200) for said in a.says(tick / 10)]
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(sent)]
    most = 10 * COLLECT_S
    assert gaps == pytest.approx([2, 2, 2, 2, 2, 4, 8, 16, 32, most, most], abs=1)  # in ticks


def test_after_a_confirmation_repeats_come_soon_again(sides):
    a, b = sides
    a.changes.append(change(0, 1))
    for tick in range(100):  # nothing is heard
        a.says(tick / 10)
    (said,) = a.says(20.0)
    b.hear(said)
    (answer,) = b.says(20.0)
    a.hear(answer)
    a.changes.append(change(0, 2))
    assert [len(a.says(now_s)) for now_s in (20.1, 20.2, 20.1 + CONFIRM_S + 0.01)] == [1, 0, 1]


def test_holdings_that_grow_are_collected(sides):
    a, _ = sides
    sent = []
    for tick in range(1, 61):
        a.changes.append(change(tick % 5, tick))
        sent += a.says(tick / 10, at_once=False)
        for message in sent[-1:]:
            a.hear(Holds(KEY, VIEW, 0, b"", message.first + len(message.changes) // 12))
    assert len(sent) == int(6 / COLLECT_S)


def test_a_member_without_news_asks_now_and_then_whether_it_is_over(sides):
    a, b = sides
    assert [tick for tick in range(100) if a.says(tick / 10)] == [50]
    (question,) = a.says(20.0)
    b.hear(question)
    assert b.says(0.1) == [], "nothing was said that wants an answer"


def test_a_gap_is_heard_and_filled(sides):
    a, b = sides
    a.changes += [change(0, 1), change(1, 2)]
    a.says(0.1)
    a.hear(Holds(KEY, VIEW, 0, b"", 1))
    (late,) = a.says(1.0)
    assert late.first == 1
    assert b.hear(late) == [], "the first change is missing"
    (answer,) = b.says(1.1)
    a.hear(answer)
    (whole,) = a.says(2.0)
    assert whole.first == 0
    assert b.hear(whole) == [change(0, 1), change(1, 2)]


def test_a_long_row_goes_in_several_messages(sides):
    a, b = sides
    a.changes += [change(place % 200, place % 250) for place in range(2 * MAX_CHANGES + 1)]
    for second in range(1, 9):
        for message in a.says(float(second)):
            assert len(message.changes) <= 12 * MAX_CHANGES
            b.hear(message)
        for message in b.says(second + 0.1):
            a.hear(message)
    assert b.heard == dict(a.changes)


@pytest.mark.parametrize("known", [0, 5, 2**62])
@pytest.mark.parametrize("first", [0, 1, 2**62])
@pytest.mark.parametrize("raw", [b"", b"x" * 11, b"x" * 25])
def test_nonsense_changes_nothing_but_what_it_says(sides, known, first, raw):
    a, b = sides
    a.hear(Holds(KEY, VIEW, first, raw, known, True))
    a.changes.append(change(0, 1))
    for message in [*a.says(0.1), *a.says(5.0), *a.says(10.0)]:
        b.hear(message)
        for answer in b.says(10.1):
            a.hear(answer)
    assert b.heard == {0: change(0, 1)[1]} or known


@pytest.mark.parametrize(
    ("deadline_s", "most_s"), [(2.0, RESEND_S), (30.0, 1.5), (100.0, 5.0), (3600.0, MAX_COLLECT_S)]
)
def test_reports_are_collected_for_a_share_of_the_deadline(deadline_s, most_s):
    assert collect_s(deadline_s) == pytest.approx(most_s)
