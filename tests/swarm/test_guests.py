"""The places of guests are few, are kept by asking again, and go round among those that wait."""

from farflock.swarm.guests import (
    MAX_GUESTS,
    MAX_UNADMITTED,
    PLACE_HELD_S,
    PLACE_LASTS_S,
    Guests,
)

A, B = b"a" * 32, b"b" * 32


def full(capability=A, most=MAX_UNADMITTED, now_s=0.0):
    """Guests of one capability, as many as it may have."""
    guests = Guests()
    for number in range(most):
        assert guests.take(f"{number}", capability, most, now_s)
    return guests


def test_a_ninth_guest_of_one_capability_waits_until_another_stops_asking():
    guests = full()
    assert not guests.take("ninth", A, MAX_UNADMITTED, 1.0)
    assert not guests.has("ninth", 1.0)
    for number in range(1, MAX_UNADMITTED):
        assert guests.take(f"{number}", A, MAX_UNADMITTED, PLACE_LASTS_S - 1)
    assert not guests.take("ninth", A, MAX_UNADMITTED, PLACE_LASTS_S - 0.5)
    assert guests.take("ninth", A, MAX_UNADMITTED, PLACE_LASTS_S)
    assert guests.has("ninth", PLACE_LASTS_S)
    assert not guests.has("0", PLACE_LASTS_S)


def test_a_guest_that_asks_again_keeps_its_place_and_takes_no_second_one():
    guests = full(most=1)
    for now_s in range(0, 100, 10):
        assert guests.take("0", A, 1, float(now_s))
        assert not guests.take("other", A, 1, float(now_s))
    assert len(guests) == 1


def test_a_place_is_over_if_its_guest_is_silent():
    guests = full(most=1)
    assert guests.has("0", PLACE_LASTS_S - 0.1)
    assert not guests.has("0", PLACE_LASTS_S)


def test_a_capability_that_is_full_leaves_the_places_of_others_alone():
    guests = full()
    assert guests.take("of another", B, MAX_UNADMITTED, 0.0)


def test_all_capabilities_together_have_so_many_guests_and_no_more():
    guests = Guests()
    taken = [guests.take(f"{number}", bytes([number]) * 32, 1, 0.0) for number in range(200)]
    assert taken == [True] * MAX_GUESTS + [False] * (200 - MAX_GUESTS)
    assert len(guests) == MAX_GUESTS


def test_all_capabilities_of_one_member_have_eight_guests_together():
    guests = Guests()
    taken = [guests.take(f"{n}", bytes([n]) * 32, 1, 0.0, "member") for n in range(20)]
    assert taken == [True] * MAX_UNADMITTED + [False] * 12
    assert guests.take("20", A, 1, 0.0, "another")
    assert guests.take("21", B, 1, 0.0)
    assert guests.take("0", bytes(32), 1, PLACE_LASTS_S - 1, "member"), "it has a place"
    assert guests.take("8", bytes([8]) * 32, 1, PLACE_LASTS_S, "member"), "others stopped asking"


def test_guests_that_never_come_in_give_their_places_to_those_that_wait():
    guests, times = full(), range(10, int(PLACE_HELD_S) + 1, 10)
    waited = []
    for now_s in map(float, times):
        for number in range(MAX_UNADMITTED):
            guests.take(f"{number}", A, MAX_UNADMITTED, now_s)
        waited.append(guests.take("ninth", A, MAX_UNADMITTED, now_s))
    assert waited == [False] * (len(times) - 1) + [True]
    assert len(guests) == MAX_UNADMITTED


def test_an_admitted_guest_needs_no_place_any_more():
    guests = full()
    guests.forget_all({"3"}.__contains__)
    assert guests.take("ninth", A, MAX_UNADMITTED, 1.0)
    assert not guests.has("3", 1.0)


def test_a_guest_that_shows_another_capability_has_one_place_by_that():
    guests = full(most=1)
    assert guests.take("0", B, 1, 1.0)
    assert guests.take("other", A, 1, 1.0)
    assert len(guests) == 2


def test_a_guest_is_put_out():
    guests = full(most=1)
    guests.forget("0")
    guests.forget("nobody")
    assert not guests.has("0", 0.0)
