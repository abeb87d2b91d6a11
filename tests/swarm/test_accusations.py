"""Accusations: counted by peer and kind, heard once, and bounded."""

from farflock.swarm.accusations import MAX_ACCUSED, MAX_KINDS, Accusations


def test_a_accusation_is_heard_once_and_counted_as_often_as_it_is_seen():
    accusations, heard = Accusations(), []
    accusations.on_new = heard.append
    for at_s in (1.0, 2.0, 5.0):
        accusations.note("liar", "two values in one ballot", at_s)
    accusations.note("liar", "a ballot out of turn", 6.0)
    assert [
        (accusation.what, accusation.times, accusation.first_s, accusation.last_s)
        for accusation in accusations
    ] == [
        ("two values in one ballot", 3, 1.0, 5.0),
        ("a ballot out of turn", 1, 6.0, 6.0),
    ]
    assert [accusation.what for accusation in heard] == [
        "two values in one ballot",
        "a ballot out of turn",
    ]


def test_neither_peers_without_end_nor_kinds_without_end_are_kept():
    accusations = Accusations()
    for number in range(2 * MAX_ACCUSED):
        accusations.note(f"peer {number}", "a lie", 0.0)
    for number in range(2 * MAX_KINDS):
        accusations.note("peer 0", f"lie {number}", 0.0)
    assert len(list(accusations)) == MAX_ACCUSED - 1 + MAX_KINDS
    assert sum(accusation.peer == "peer 0" for accusation in accusations) == MAX_KINDS
