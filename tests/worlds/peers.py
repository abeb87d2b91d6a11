"""Peers made by hand, as tests of the swarm and of nodes need them."""

import contextlib

from farflock.node.process.status import Status
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer
from farflock.swarm.record import Record, seal
from farflock.swarm.tasks import cancel


def identity(number):
    return Identity.from_seed(bytes([number + 1]) * 32)


def record_of(owner, run="run", incarnation=1, role="replica"):
    """The sealed record of a peer that nobody can dial."""
    return seal(owner, Record(run, owner.peer, incarnation, incarnation, bytes(32), role=role))


def peer_over(
    links, owner, terms, incarnation=1, *, record=None, role="replica", directory=None, **more
):
    """A peer with these links. `record` makes its record; without it, that is always the same."""
    mine = record_of(owner, terms.run, incarnation, role)
    make = record or (lambda: mine)
    return Peer(terms, owner, links, directory, incarnation=incarnation, record=make, **more)


async def end(*tasks):
    """End the tasks of peers; raise the error that ended any of them."""
    for result in await cancel(*tasks):
        if isinstance(result, Exception):
            raise result


def peer_in(network, owner, terms, incarnation=1, **more):
    """A peer on a simulated network."""
    return peer_over(network.links(owner.peer), owner, terms, incarnation, **more)


@contextlib.contextmanager
def logged(log):
    """Collect what is logged while the block runs."""
    said = []

    def note(record):
        said.append(record.getMessage())
        return True

    log.addFilter(note)
    try:
        yield said
    finally:
        log.removeFilter(note)


def node_status(**known):
    """The status of a member that has done nothing yet, but for what is known of it."""
    counts = ("pid", "step", "tokens", "total_tokens", "view")
    traffic = ("sent_bytes", "received_bytes", "unsure_rounds")
    zeros, empty = dict.fromkeys(counts + traffic, 0), ("members", "partners", "waits")
    named = {"run": "ab" * 16, "peer": "p", "invite": "farflock:x", "loss": None, "dropped": {}}
    return Status(**{**zeros, **dict.fromkeys(empty, ()), **named, "is_member": True, **known})
