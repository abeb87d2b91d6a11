"""What rounds named of one trainer's microbatches: its own alone, doubles noticed, and a memory that is bounded."""

from farflock.node.pipeline.trainer.heard import REMEMBERED, Heard


def test_its_own_numbers_are_told_and_what_a_stage_names_twice_is_counted():
    heard = Heard("me", 2)
    assert heard.of_round(0, [("me", 1), ("you", 2), ("me", 3)]) == [1, 3]
    assert heard.of_round(1, [("me", 1)]) == [1]
    assert heard.of_round(0, [("you", 2)]) == []
    assert heard.doubled == 0, "another stage, and another trainer"
    assert heard.of_round(0, [("me", 3), ("me", 1), ("me", 4)]) == [3, 1, 4]
    assert heard.doubled == 2


def test_only_the_last_numbers_are_remembered():
    heard = Heard("me", 1)
    heard.of_round(0, [("me", number) for number in range(2 * REMEMBERED + 1)])
    assert len(heard._named[0]) == REMEMBERED
    heard.of_round(0, [("me", 0), ("me", 2 * REMEMBERED)])
    assert heard.doubled == 1, "the first is forgotten, the last is not"
