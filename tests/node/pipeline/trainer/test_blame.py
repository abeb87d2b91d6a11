"""The server to blame for a payload that cannot be decoded is avoided."""

import pytest

from farflock.node.pipeline.trainer.blame import QUARANTINE_S, WITNESSES, PayloadOrigins, Quarantine

INPUT = (1, "input")


@pytest.mark.parametrize(("servers", "words"), [(1, 1), (2, 2), (5, 2)])
def test_two_servers_must_refuse_it_or_the_only_one(servers, words):
    origins = PayloadOrigins()
    origins.made(INPUT, "maker")
    said = [origins.refused(INPUT, f"server {number}", servers) for number in range(words)]
    assert said == [False] * (words - 1) + [True]


def test_one_server_is_one_word_however_often_it_refuses():
    origins = PayloadOrigins()
    origins.made(INPUT, "maker")
    assert not any(origins.refused(INPUT, "server", 2) for _ in range(5))
    assert origins.to_blame(INPUT) is None


def test_the_only_server_has_a_message_made_again_and_no_server_is_blamed():
    origins = PayloadOrigins()
    origins.made(INPUT, "maker")
    assert origins.refused(INPUT, "server", 1)
    assert origins.to_blame(INPUT) is None


def test_a_message_that_was_made_again_has_no_refusals():
    origins = PayloadOrigins()
    for maker in ("one", "other"):
        origins.made(INPUT, maker)
        assert not origins.refused(INPUT, "a", 3)
        assert origins.refused(INPUT, "b", 3)
        assert origins.to_blame(INPUT) == maker
    assert origins.to_blame((1, "gradient")) is None


def test_for_what_the_trainer_made_no_server_is_to_blame():
    origins = PayloadOrigins()
    for number in range(WITNESSES):
        origins.refused((0, "input"), f"server {number}", 2)
    assert origins.to_blame((0, "input")) is None


def test_refusals_of_a_message_are_remembered_until_it_is_made_again():
    origins = PayloadOrigins()
    origins.made(INPUT, "maker")
    origins.refused(INPUT, "a", 3)
    assert (origins.refusers(1), origins.refusers(2)) == ({"a"}, set())
    origins.made(INPUT, "other")
    assert origins.refusers(1) == set()


def test_a_server_in_quarantine_is_so_at_that_stage_for_a_while():
    quarantine = Quarantine()
    quarantine.add(1, "a", 10.0)
    assert quarantine.at(1, 10.0 + QUARANTINE_S - 1) == {"a"}
    assert quarantine.at(2, 11.0) == set()
    assert quarantine.at(1, 10.0 + QUARANTINE_S) == set()


def test_what_is_over_is_forgotten():
    quarantine = Quarantine()
    for number in range(100):
        quarantine.add(0, f"server {number}", number * QUARANTINE_S)
    assert len(quarantine) == 1
