import pytest

from farflock.swarm.dht.greeting import (
    ClockSkew,
    DirectoryUnreachable,
    Greeting,
    clock_ahead_s,
    judge,
)

FINE = Greeting(0.0, True)


def test_two_good_answers_let_a_peer_in():
    judge(2, [FINE, FINE], client_mode=False)


def test_silence_is_explained_with_a_remedy():
    with pytest.raises(
        DirectoryUnreachable, match=r"none of the 3 addresses answered.*fresh invite"
    ):
        judge(3, [], client_mode=True)


def test_a_wrong_clock_is_explained_with_its_size_and_its_side():
    with pytest.raises(ClockSkew, match=r"3600\.0 s ahead of .*NTP"):
        judge(1, [Greeting(3600.0, True)], client_mode=False)
    with pytest.raises(ClockSkew, match=r"10\.0 s behind"):
        judge(1, [Greeting(-10.0, True)], client_mode=True)


def test_one_liar_of_two_cannot_keep_anybody_out():
    judge(2, [Greeting(1e9, False), FINE], client_mode=False)
    judge(2, [FINE, Greeting(float("-inf"), False)], client_mode=False)
    judge(2, [FINE, Greeting(float("nan"), False)], client_mode=False)


def test_a_peer_that_cannot_be_dialled_is_told_to_join_as_a_client():
    mute = Greeting(0.0, False)
    with pytest.raises(DirectoryUnreachable, match=r"2 of 3 peers could not dial.*client mode"):
        judge(3, [mute, FINE, mute], client_mode=False)
    judge(3, [mute, FINE, mute], client_mode=True)


@pytest.mark.parametrize(
    ("sent_s", "received_s", "their_s", "ahead_s"),
    [
        (100.0, 101.0, 100.5, 0.0),
        (100.0, 101.0, 90.0, 10.0),
        (100.0, 101.0, 105.0, -4.0),
        (100.0, 101.0, 101.0, 0.0),
    ],
)
def test_the_round_trip_is_given_the_benefit_of_the_doubt(sent_s, received_s, their_s, ahead_s):
    assert clock_ahead_s(sent_s, received_s, their_s) == ahead_s


def test_a_time_that_is_no_number_counts_as_right():
    assert clock_ahead_s(100.0, 101.0, float("nan")) == 0.0
