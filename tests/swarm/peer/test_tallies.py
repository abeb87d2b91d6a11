"""The tally of a stage: every peer adds up the reports of the living members, for the next
round."""

import collections

from farflock.swarm.messages import Key, Tally
from farflock.swarm.peer.tallies import REPEAT_S, Tallies, TallyReport
from farflock.swarm.protocol.views import Certified, Chain, Member, View, genesis
from farflock.swarm.roles import EVERY, NOTHING

STREAM = "grad/1"
MEMBERS = (
    Member("me", 1, 1),
    Member("mate", 1, 1),
    Member("other", 1, 0),
    Member("all", 1, EVERY),
    Member("t", 1, NOTHING),
)


class Port:
    """The interface that tallies need."""

    me, incarnation = "me", 1

    def __init__(self, members=MEMBERS):
        first = genesis("run", members[0])
        self.views = Chain("run", [Certified(View(1, first.hash, 0, members))])
        self.sent, self.dead, self.time_s, self.counters = [], set(), 0.0, collections.Counter()
        self.suspects, self.lives = set(), {}

    def now(self):
        return self.time_s

    def send(self, peer, message):
        self.sent.append((peer, message))

    def gone(self, view, peer):
        return self.life(peer) != "alive"

    def life(self, peer):
        return "dead" if peer in self.dead else "suspect" if peer in self.suspects else "alive"

    def drop(self, reason):
        self.counters[reason] += 1


def made():
    port = Port()
    tallies = Tallies(port)
    tallies.say(STREAM, 1, 4, 10)
    return port, tallies


def heard(tallies, sender, number, tokens, life=1, stream=STREAM):
    tallies.changed.clear()
    tallies.receive(sender, life, Tally(Key(stream, number), tokens))
    return tallies.changed.is_set()


def test_a_number_is_told_to_the_stages_servers_and_to_no_other_peer():
    port, _ = made()
    assert port.sent == [(peer, Tally(Key(STREAM, 4), 10)) for peer in ("mate", "all")]


def test_the_sum_is_that_of_the_living_members_of_the_stage():
    port, tallies = made()
    assert tallies.total(STREAM) == 10
    assert heard(tallies, "mate", 4, 7)
    assert heard(tallies, "all", 4, 100)
    assert tallies.total(STREAM) == 117
    port.dead.add("mate")
    assert tallies.total(STREAM) == 110
    port.dead.add("me")
    assert tallies.total(STREAM) == 110, "no peer is gone to itself"


def test_a_newer_number_replaces_an_older_one_and_not_the_other_way_round():
    _, tallies = made()
    assert heard(tallies, "mate", 4, 7)
    assert heard(tallies, "mate", 4, 9)
    assert not heard(tallies, "mate", 4, 8), "it was late"
    assert not heard(tallies, "mate", 3, 50)
    assert tallies.total(STREAM) == 19


def test_what_is_for_another_round_does_not_count_till_this_one_is_there():
    _, tallies = made()
    heard(tallies, "mate", 5, 7)
    assert tallies.total(STREAM) == 10
    tallies.say(STREAM, 1, 5, 2)
    assert tallies.total(STREAM) == 9
    tallies.say(STREAM, 1, 6, 0)
    assert tallies.total(STREAM) == 0


def over(tallies, sender, life=1):
    tallies.receive(sender, life, Tally(Key(STREAM, 4), 3, over=True))
    return tallies.is_over(STREAM)


def test_a_run_is_over_to_a_stage_once_it_is_to_all_of_it_that_live():
    port, tallies = made()
    assert not tallies.is_over(STREAM)
    assert not over(tallies, "mate")
    assert not over(tallies, "other"), "it serves another stage"
    assert not over(tallies, "all")
    port.sent.clear()
    tallies.end(STREAM, 1)
    tallies.end(STREAM, 1)
    assert port.sent == [(peer, Tally(Key(STREAM, 4), 10, over=True)) for peer in ("mate", "all")]
    assert tallies.is_over(STREAM)
    assert tallies.total(STREAM) == 0, "no peer begins a round any more"


def test_a_peer_that_is_gone_is_not_waited_for_at_the_end_but_its_next_life_is():
    port, tallies = made()
    tallies.end(STREAM, 1)
    assert not over(tallies, "mate")
    port.dead.add("all")
    assert tallies.is_over(STREAM)
    port.dead.clear()
    assert not over(tallies, "all", life=2), "that life is in no view"


def test_a_suspect_counts_for_nothing_in_a_sum_and_is_waited_for_at_the_end():
    """On a lossy line it may be there, and lack what those that leave take with them."""
    port, tallies = made()
    heard(tallies, "mate", 4, 7)
    port.suspects.add("mate")
    assert tallies.total(STREAM) == 10
    tallies.end(STREAM, 1)
    over(tallies, "all")
    assert not tallies.is_over(STREAM)
    port.lives["mate"] = 2
    assert tallies.is_over(STREAM), "its next life has nothing to take with it"
    port.lives.clear()
    over(tallies, "mate")
    assert tallies.is_over(STREAM)


def test_what_is_over_stays_so_whatever_else_is_said():
    port, tallies = made()
    tallies.end(STREAM, 1)
    tallies.say(STREAM, 1, 5, 2)
    assert port.sent[-1][1] == Tally(Key(STREAM, 5), 2, over=True)
    heard(tallies, "mate", 5, 9)
    assert tallies.total(STREAM) == 9, "of a peer that has not heard of the end yet"
    over(tallies, "mate")
    assert not heard(tallies, "mate", 6, 9), "said before the end, and come after it"
    assert tallies.total(STREAM) == 0


def test_the_end_of_a_stream_that_nothing_was_said_of_is_told_as_well():
    port = Port()
    tallies = Tallies(port)
    tallies.end(STREAM, 1)
    assert port.sent == [(peer, Tally(Key(STREAM, 0), 0, over=True)) for peer in ("mate", "all")]


def test_the_end_is_told_with_the_next_round_and_again_with_a_later_one():
    port = Port()
    tallies = Tallies(port)
    tallies.end(STREAM, 1, 6)
    tallies.end(STREAM, 1, 6)
    tallies.end(STREAM, 1, 5)
    assert [message for peer, message in port.sent if peer == "mate"] == [
        Tally(Key(STREAM, 6), 0, over=True)
    ]
    tallies.end(STREAM, 1, 7)
    assert port.sent[-1][1] == Tally(Key(STREAM, 7), 0, over=True)
    over(tallies, "mate")
    assert tallies.reports(STREAM) == {
        "me": TallyReport(True, 7, 0),
        "mate": TallyReport(True, 4, 3),
        "all": TallyReport(),
    }
    port.dead.add("mate")
    assert tallies.reports(STREAM).keys() == {"me", "all"}


def test_of_a_stream_of_the_whole_model_all_members_are_told_and_awaited():
    port = Port()
    tallies = Tallies(port)
    tallies.end("delta", None, 2)
    assert [peer for peer, _ in port.sent] == ["mate", "other", "all", "t"]
    assert tallies.reports("delta").keys() == {"me", "mate", "other", "all", "t"}


def test_others_lives_stages_and_streams_are_dropped_and_counted():
    port, tallies = made()
    for sender, life, stream in (
        ("other", 1, STREAM),
        ("t", 1, STREAM),
        ("mate", 2, STREAM),
        ("stranger", 1, STREAM),
    ):
        assert not heard(tallies, sender, 4, 1000, life, stream)
    assert not heard(tallies, "mate", 4, 1000, stream="unheard-of")
    assert port.counters["tally of somebody else"] == 5
    assert tallies.total(STREAM) == 10
    assert tallies.total("unheard-of") == 0


def test_a_member_that_serves_another_stage_in_the_next_view_no_longer_counts():
    port, tallies = made()
    heard(tallies, "mate", 4, 7)
    moved = (MEMBERS[0], Member("mate", 2, 0), *MEMBERS[2:])
    port.views.views.append(Certified(View(2, bytes(32), 0, moved)))
    assert tallies.total(STREAM) == 10


def next_view(port, *members):
    port.views.views.append(Certified(View(2, bytes(32), 0, members)))


def test_another_life_of_a_member_begins_with_nothing_and_the_end_of_the_former_is_not_its_own():
    port, tallies = made()
    over(tallies, "all")
    over(tallies, "mate")
    next_view(port, MEMBERS[0], Member("mate", 9, 1), *MEMBERS[2:])
    assert tallies.total(STREAM) == 10
    assert heard(tallies, "mate", 4, 1, life=9), "less than the former life had, and not over"
    assert tallies.total(STREAM) == 11
    tallies.end(STREAM, 1)
    assert not tallies.is_over(STREAM)
    assert over(tallies, "mate", life=9)


def test_a_waiter_is_woken_by_what_i_say_too():
    _, tallies = made()
    for say in (lambda: tallies.say(STREAM, 1, 4, 11), lambda: tallies.end(STREAM, 1)):
        tallies.changed.clear()
        say()
        assert tallies.changed.is_set()
        tallies.changed.clear()
        say()
        assert not tallies.changed.is_set(), "nothing new"


def test_what_departed_members_said_is_not_kept():
    port, tallies = made()
    for life in range(2, 20):
        heard(tallies, "mate", 4, 7, life=life - 1)
        next_view(port, MEMBERS[0], Member("mate", life, 1), *MEMBERS[2:])
    heard(tallies, "all", 4, 7)
    assert len(tallies._books[STREAM].reports) == 2


def test_a_former_member_that_hears_of_others_still_tells_its_own_number():
    port, tallies = made()
    next_view(port, *MEMBERS[1:])
    assert heard(tallies, "mate", 4, 7)
    port.sent.clear()
    port.time_s = REPEAT_S
    tallies.tick()
    assert ("mate", Tally(Key(STREAM, 4), 10)) in port.sent


def test_only_a_change_is_told_at_once_and_everything_again_after_a_while():
    port, tallies = made()
    port.sent.clear()
    tallies.say(STREAM, 1, 4, 10)
    assert port.sent == []
    port.time_s = REPEAT_S - 0.01
    tallies.tick()
    assert port.sent == []
    port.time_s = REPEAT_S
    tallies.tick()
    tallies.tick()
    assert [peer for peer, _ in port.sent] == ["mate", "all"]
    tallies.say(STREAM, 1, 4, 11)
    assert port.sent[-1][1].tokens == 11


def test_no_number_of_one_other_member_counts_for_more_than_the_most():
    _, tallies = made()
    heard(tallies, "mate", 4, 2**62)
    assert tallies.total(STREAM, 8) == 10 + 8
    heard(tallies, "all", 4, 5)
    assert tallies.total(STREAM, 8) == 10 + 8 + 5
    assert tallies.total(STREAM, 3) == 10 + 3 + 3, "its own number counts whole"


def test_the_end_of_one_member_is_not_that_of_the_others():
    _, tallies = made()
    tallies.receive("mate", 1, Tally(Key(STREAM, 2**62), 2**62, over=True))
    assert not tallies.is_over(STREAM)
    assert tallies.total(STREAM) == 10
