"""The members of an exchange: contributors and voters, the living and the suspect, and their
turns."""

from farflock.swarm.protocol.exchange.roster import Roster

PEERS = tuple("abcde")


def roster(me=2, rotation=(1, 2, 0)):
    return Roster(PEERS, me, (2, 0, 1, 4, 3), rotation)


def test_without_a_rotation_everybody_contributes():
    everybody = Roster(PEERS, 3, (2, 0, 1, 4, 3))
    assert everybody.contributors == frozenset(range(5))
    assert not everybody.has_voters
    assert everybody.reducers(1) == (0, 1, 4, 3, 2)


def test_a_member_that_is_not_in_the_rotation_only_votes():
    assert roster(me=2).contributes
    assert not roster(me=3).contributes
    assert roster().has_voters
    assert roster(me=2).others == [0, 1]
    assert roster(me=3).others == [0, 1, 2]


def test_content_concerns_contributors_among_themselves_alone():
    assert roster(me=2).brings(0)
    assert not roster(me=2).brings(3)
    assert not roster(me=3).brings(0)


def test_a_member_does_not_suspect_itself():
    mine = roster(me=2)
    mine.suspect(frozenset({0, 2, 4}))
    assert mine.suspects == {0, 4}
    assert mine.living == {1, 2}


def test_a_turn_comes_after_the_living_members_before_it():
    mine = roster(me=4)
    assert (mine.place, mine.live_before_me) == (3, 3)
    mine.suspect(frozenset({0, 3}))
    assert (mine.place, mine.live_before_me) == (3, 2)


def test_each_shard_has_another_first_reducer():
    assert [roster().reducers(shard) for shard in range(3)] == [(1, 2, 0), (2, 0, 1), (0, 1, 2)]
