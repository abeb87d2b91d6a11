"""A node that joins goes to all the addresses that it has heard of."""

from dataclasses import replace

from farflock.node.assembly.session import widened
from farflock.node.run.invite import Invite
from farflock.swarm.contact import Contact

FOUNDER = Contact("founder", bytes(32), "203.0.113.7", 4001, 4002)
OVER_IP6 = replace(FOUNDER, host="2001:db8::7")
OTHER = Contact("other", bytes(32), "203.0.113.8", 4001, 4002)


def test_each_address_of_a_member_stays_and_the_newer_ports_of_one_count():
    invite = Invite("0" * 32, b"founder", (FOUNDER, OVER_IP6), "run", 1)
    assert widened(invite, None) == invite
    before = replace(invite, members=(replace(OVER_IP6, control=5001), OTHER))
    assert widened(invite, before).members == (FOUNDER, OVER_IP6, OTHER)
