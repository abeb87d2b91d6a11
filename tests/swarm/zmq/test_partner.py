"""What a peer's links know of others ages with the time in which they could have heard of them."""

from worlds.peers import identity, record_of

from farflock.swarm.record import unseal
from farflock.swarm.zmq.partner import WANTED_S, PartnerTable
from farflock.swarm.zmq.zap import Gate


def test_a_peer_that_slept_still_knows_where_the_others_are_and_wants_them():
    table, record = PartnerTable("me", Gate("run", "me", ())), unseal(record_of(identity(0)), "run")
    assert table.note(record, 0.0)
    partner = table.want(record.peer, 1.0)
    table.excuse(900.0)
    now_s = 901.0
    assert partner.wanted(now_s)
    assert table.record(record.peer, now_s) == record
    later_s = 900.0 + record.lifetime_s
    assert table.record(record.peer, later_s) is None
    assert not partner.wanted(901.0 + WANTED_S)
