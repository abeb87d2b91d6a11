"""Attacks on a real run by a peer that no view lists: it has the run's id, one address, and as many
keys as it likes."""

import asyncio
import contextlib
import secrets

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.utils import get_dht_time as wall_s

from farflock.node.process.network import learn_run, network
from farflock.swarm.dht.validator import cell_name, key_hash, wrap
from farflock.swarm.identity import Identity
from farflock.swarm.messages import Join
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.record import Record
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

DECOYS, BAD_RECORDS = 12, 6
AGAIN_S = 5.0
LASTS_S = 60.0  # a stored record
LIFE = 1
NO_DOOR = "not an address \x1b[31m"


async def store(directory, run, key, record):
    """Store a record of any key with every peer of the directory, and here whatever they say;
    return their answers: True if it was taken, False if it was refused, None without an answer."""
    name, protocol = cell_name(run, 0), directory.protocol
    item, place = wrap(key, name, record, wall_s() + LASTS_S), key_hash(name)
    protocol.shelf.put(place, item, wall_s())
    stored = (
        protocol.call_store(
            peer, [DHTID.from_bytes(place)], [item.value], item.expires_s, subkeys=[item.subkey]
        )
        for peer in list(protocol.routing_table.uid_to_peer_id.values())
    )
    return [answer and answer[0] for answer in await asyncio.gather(*stored)]


# Records whose doors are no addresses.


def with_bad_doors(run, key):
    """A record that its owner signed, and that no honest peer makes."""
    record = Record(run, key.peer, LIFE, LIFE, bytes(32), doors=(NO_DOOR,))
    body = msgspec.msgpack.encode(record)
    return key.sign(b"record", body) + body


async def bad_records(process, keys, begin):
    """Offer bad records to the directory and to the members until cancelled; the attack begins
    with the first answer."""
    run, context, begun = process.run, process.member.peer.context, False
    while True:
        for key in keys:
            blob = with_bad_doors(run, key)
            answers = await store(process.directory, run, key, blob)
            assert True not in answers, "an honest peer stores a bad record"
            if False in answers and not begun:
                begin()
            begun = begun or False in answers
            for peer in context.views.newest.peers:
                if peer != context.me:
                    context.send(peer, Join(blob))
        await asyncio.sleep(AGAIN_S)


# A line of views that a stranger founds under the run's id.


@contextlib.asynccontextmanager
async def decoy(key, run, manifest):
    """A whole peer that founded a run of its own under this id; its links while the block runs."""
    incarnation = secrets.randbits(62)
    links = await ZmqLinks.open(key, run, LinkOptions(incarnation=incarnation))
    try:
        terms = RunTerms(run, manifest.run.seed, key.peer, manifest.exchange.view_s)
        peer = Peer(terms, key, links, None, incarnation=incarnation, record=links.record)
        async with peer.running():
            peer.found()
            yield links
    finally:
        await links.close()


async def eclipse(machine, identity, invite, keys, begin):
    """Announce decoys in the run's directory until cancelled; none of them is a member."""
    doors = network(machine, identity, invite.run, invite.addresses)
    async with doors as (directory, links), contextlib.AsyncExitStack() as stack:
        _, manifest, _ = await learn_run(directory, links, invite)
        decoys = [
            (key, await stack.enter_async_context(decoy(key, invite.run, manifest))) for key in keys
        ]
        begun = False
        while True:
            taken = [await store(directory, invite.run, key, its.record()) for key, its in decoys]
            is_there = all(True in answers for answers in taken)
            if is_there and not begun:
                begin()
            begun = begun or is_there
            await asyncio.sleep(AGAIN_S)


def made_up_keys(count):
    return [Identity.generate() for _ in range(count)]
