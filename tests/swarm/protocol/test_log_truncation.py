"""Enough members must say that a round is gone: whose word counts, when it is believed, and how far
it leads."""

import random

import pytest

from farflock.swarm.messages import Forgotten, Key
from farflock.swarm.protocol.log_truncation import (
    ANSWER_TIMEOUT_S,
    LogTruncation,
    newest_of,
    oldest_of,
)

ABCDE = ("a", "b", "c", "d", "e")


def word(number=7, oldest=20, newest=27):
    return Forgotten(Key("s", number), oldest, newest)


def told(*peers, number=7, members=ABCDE):
    forgetting = LogTruncation()
    for peer in peers:
        forgetting.note(peer, word(number), members, 1.0)
    return forgetting


@pytest.mark.parametrize(
    ("living", "said", "agreed"),
    [
        ("a", "", False),
        ("a", "a", True),
        ("ab", "a", False),
        ("ab", "ab", True),
        ("abc", "ab", True),
        ("abcd", "ab", False),
    ],
)
def test_a_majority_of_the_living_has_to_say_so(living, said, agreed):
    assert bool(told(*said).agreed(7, list(living))) == agreed


def test_the_dead_and_former_members_have_no_say():
    forgetting = told("a", "b", "c")
    assert len(forgetting.agreed(7, list(ABCDE))) == 3
    assert forgetting.agreed(7, ["c", "d", "e"]) == []
    assert forgetting.note("d", word(), ("c", "d", "e"), 1.0)
    assert set(forgetting.said) == {"c", "d"}, "kept for members only"


def test_words_are_about_one_round():
    forgetting = told("a", "b", number=7)
    assert forgetting.agreed(8, ["a", "b"]) == []
    assert forgetting.by(8, "a") is None
    assert forgetting.note("a", word(8), ABCDE, 2.0)
    assert (forgetting.by(7, "b"), forgetting.by(8, "a")) == (None, word(8))


def test_the_same_word_again_is_no_news_and_the_last_one_holds():
    forgetting = told("a")
    assert not forgetting.note("a", word(oldest=30), ABCDE, 2.0)
    assert forgetting.by(7, "a") == word(oldest=30)
    assert len(forgetting.said) == 1


def test_some_are_believed_once_the_others_had_time_to_speak():
    forgetting = told("a")
    living = list(ABCDE)
    assert forgetting.unopposed(7, living, 1.0 + ANSWER_TIMEOUT_S - 0.01) == []
    assert forgetting.unopposed(7, living, 1.0 + ANSWER_TIMEOUT_S) == [word()]
    assert forgetting.unopposed(8, living, 1.0 + ANSWER_TIMEOUT_S) == []
    forgetting.note("a", word(), ABCDE, 3.0)
    assert forgetting.unopposed(7, living, 1.0 + ANSWER_TIMEOUT_S) == [word()], (
        "a repeated word puts nothing off"
    )
    assert forgetting.unopposed(7, ["a"], 1.0) == [word()]


@pytest.mark.parametrize("seed", range(20))
def test_no_minority_leads_astray(seed):
    chance = random.Random(seed)
    honest = [chance.randrange(100, 110) for _ in range(chance.randrange(1, 8))]
    lies = [chance.choice((8, 2**62)) for _ in range(len(honest) - 1)]
    words = [word(oldest=min(newest, 100), newest=newest) for newest in (*honest, *lies)]
    chance.shuffle(words)
    assert min(honest) <= newest_of(words) <= max(honest)
    begins = [word(oldest=number, newest=number + 8) for number in (*honest, *lies)]
    chance.shuffle(begins)
    assert min(honest) <= oldest_of(begins) <= max(honest)


def test_a_member_with_an_empty_log_says_with_what_it_begins():
    assert newest_of([word(oldest=30, newest=29)]) == 30
