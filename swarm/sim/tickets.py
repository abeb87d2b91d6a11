"""Tickets for simulated runs: as an invite of the founder's gives them, for any number of peers,
all of which may come to vote."""

import hashlib

from farflock.swarm.capability import MAX_UNIX_S, Ticket
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_MEMBERS


def ticket_of(founder: Identity, run: str) -> Ticket:
    """Return the founder's standing invitation to a run, always the same one."""
    secret = hashlib.sha256(f"ticket/{run}/{founder.peer}".encode()).digest()
    return Ticket.issue(founder, run, secret, MAX_UNIX_S, uses=0, votes=MAX_MEMBERS)
