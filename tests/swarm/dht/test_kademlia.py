"""The real directory: a few libp2p daemons on loopback in one event loop, some of them hostile."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("hivemind")

import hivemind.dht.node
from hivemind.dht.protocol import DHTProtocol as PlainProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from worlds.waiting import LIMIT_S, completed, until

from farflock.swarm.dht import daemon
from farflock.swarm.dht import kademlia as dht
from farflock.swarm.dht.daemon import BoundDaemon
from farflock.swarm.dht.files import IdentityInUse, PortTaken
from farflock.swarm.dht.greeting import ClockSkew, DirectoryUnreachable
from farflock.swarm.dht.item_store import StoredItem
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.dht.validator import (
    cell_name,
    head_name,
    key_hash,
    pack_items,
    unpack_items,
    wrap,
)
from farflock.swarm.identity import Identity, peer_id
from farflock.swarm.quota import BURST_UNITS, UNITS_PER_S
from farflock.swarm.record import BadRecord, Record, seal

pytestmark = pytest.mark.net

RUN = "run-1"
CELL, HEAD = cell_name(RUN, 0), head_name(RUN)
UNREACHABLE = "/ip4/127.0.0.1/tcp/1/p2p/" + peer_id(b"\x01" * 32)


def identity(number):
    return Identity.from_seed(bytes([number]) * 32)


def record(number, sequence=1, **fields):
    owner = identity(number)
    return seal(
        owner,
        Record(
            run=RUN,
            peer=owner.peer,
            incarnation=number,
            sequence=sequence,
            curve=bytes(32),
            **fields,
        ),
    )


def key_file(folder, number):
    path = folder / f"key-{number}"
    if not path.exists():
        identity(number).save(path)
    return path


async def opened(stack, folder, number, peers=(), **options):
    directory = await DhtDirectory.open(
        key_file(folder, number), run=RUN, initial_peers=peers, **options
    )
    stack.push_async_callback(directory.close)
    return directory


async def swarm(stack, folder, count):
    """`count` directories with the numbers 1, 2, …, all joined through the first."""
    first = await opened(stack, folder, 1)
    others = [
        await opened(stack, folder, number, first.addresses) for number in range(2, count + 1)
    ]
    return [first, *others]


def in_loop(test):
    """Run a test's coroutine with an exit stack that closes whatever it opened, and check that
    nothing is left behind."""

    def run(tmp_path):
        async def main():
            async with contextlib.AsyncExitStack() as stack:
                await test(stack, tmp_path)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(main())
        assert not daemons()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def daemons():
    """The living child processes, except those that stay once a test has used a process pool or a
    nursery."""
    living = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [
        child
        for child in living
        if not re.search("multiprocessing|nursery", " ".join(child.cmdline()))
    ]


async def hostile(stack, honest, protocol=PlainProtocol, max_message_bytes=2**20):
    """A peer of plain hivemind without validator or limits, in the tables of all honest peers."""
    p2p = await P2P.create(
        initial_peers=[honest[0].addresses[0]],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        startup_timeout=LIMIT_S,
        persistent_conn_max_msg_size=max_message_bytes,
    )
    stack.push_async_callback(ended, p2p)
    evil = await protocol.create(p2p, DHTID.generate(), 20, 5, 5, LIMIT_S)
    for directory in honest:
        assert await evil.call_ping(target(directory)) is not None
    return evil


@contextlib.asynccontextmanager
async def stopped(directory):
    """The directory's daemon neither answers nor ends, as after SIGSTOP or on a cut link."""
    process = psutil.Process(directory.daemon_pid)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED, every_s=0.01)
    try:
        yield
    finally:
        process.resume()


async def ended(p2p):
    control = p2p._client.control
    serving = [p2p._reader_task, control._read_task, control._write_task]
    await p2p.shutdown()
    await asyncio.gather(*serving, return_exceptions=True)


def target(directory):
    return PeerID.from_base58(directory.me)


def fair(number, name=CELL, body=None, lifetime_s=60.0):
    return wrap(
        identity(number), name, record(number) if body is None else body, time.time() + lifetime_s
    )


async def store(evil, directory, item, name=CELL, subkey=None, in_cache=False):
    answer = await evil.call_store(
        target(directory),
        [DHTID.from_bytes(key_hash(name))],
        [item.value],
        item.expires_s,
        subkeys=[item.subkey if subkey is None else subkey],
        in_cache=in_cache,
    )
    return bool(answer and answer[0])


@in_loop
async def test_peers_find_each_others_records_and_heads(stack, folder):
    a, b = await swarm(stack, folder, 2)
    c = await opened(stack, folder, 3, [*a.addresses, *b.addresses], client_mode=True)
    assert c.addresses == ()
    for number, directory in enumerate((a, b, c), start=1):
        assert await directory.announce(RUN, record(number))
    for directory in (a, b, c):
        assert set(await directory.peers(RUN)) == {record(1), record(2), record(3)}
        assert await directory.confirm_visible()
    assert await a.publish_head(RUN, b"head 1")
    assert await b.publish_head(RUN, b"head 2")
    assert await c.publish_head(RUN, b"head 2")
    assert await c.heads(RUN) == [b"head 1", b"head 2"]


@in_loop
async def test_what_a_lone_founder_announced_is_found_by_later_peers(stack, folder):
    founder = await opened(stack, folder, 1)
    assert not await founder.confirm_visible()
    assert not await founder.announce(RUN, record(1))
    assert not await founder.confirm_visible()
    assert await founder.peers(RUN) == [record(1)]
    joiner = await opened(stack, folder, 2, founder.addresses)
    assert await joiner.peers(RUN) == [record(1)]
    assert await founder.announce(RUN, record(1, sequence=2))
    assert await founder.confirm_visible()


@in_loop
async def test_a_newer_record_replaces_the_older_also_with_a_shorter_lifetime(stack, folder):
    a, b = await swarm(stack, folder, 2)
    await a.announce(RUN, record(1, sequence=1, lifetime_s=600.0))
    await a.announce(RUN, record(1, sequence=2, lifetime_s=LIMIT_S))
    assert await b.peers(RUN) == [record(1, sequence=2, lifetime_s=LIMIT_S)]
    assert await a.confirm_visible()


@in_loop
async def test_records_and_heads_expire(stack, folder):
    a, b = await swarm(stack, folder, 2)
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(now_s=time.time())  # which stands while the test works
        patch.setattr(dht, "wall_s", lambda: clock.now_s)
        await a.announce(RUN, record(1, lifetime_s=60.0))
        await a.publish_head(RUN, b"head")
        clock.now_s += 59
        assert await b.peers(RUN) == await a.peers(RUN) != []
        clock.now_s += 2
        assert await b.peers(RUN) == await a.peers(RUN) == []
        assert not await a.confirm_visible()
        assert await b.heads(RUN) == [b"head"]
        clock.now_s += 240
        assert await b.heads(RUN) == []


@in_loop
async def test_more_cells_are_read_as_one(stack, folder):
    a = await opened(stack, folder, 1, cells=1)
    b = await opened(stack, folder, 2, a.addresses, cells=4)
    await a.announce(RUN, record(1))
    await b.announce(RUN, record(2))
    assert set(await b.peers(RUN)) == {record(1), record(2)}


@in_loop
async def test_only_records_of_this_run_and_of_mine_are_announced(stack, folder):
    a = await opened(stack, folder, 1)
    with pytest.raises(BadRecord, match="cannot announce a record of"):
        await a.announce(RUN, record(2))
    with pytest.raises(ValueError, match="opened for run run-1; open another one for run run-2"):
        await a.peers("run-2")
    with pytest.raises(ValueError, match="1 to 2048 bytes, got 2049"):
        await a.publish_head(RUN, bytes(2049))


@in_loop
async def test_hostile_stores_are_refused_by_storing_peers(stack, folder):
    a, b = await swarm(stack, folder, 2)
    await a.announce(RUN, record(1))
    evil = await hostile(stack, [a, b])
    victims = next(iter(b.protocol.shelf.items(key_hash(CELL), time.time())))
    mine = fair(9)
    refused = {
        "forged under the victim's subkey": store(evil, b, mine, subkey=victims.subkey),
        "garbage under the victim's subkey": store(evil, b, victims._replace(value=b"\xc4\x03abc")),
        "replayed with a later expiry": store(
            evil, b, victims._replace(expires_s=victims.expires_s + 100)
        ),
        "replayed as it is": store(evil, b, victims),
        "expires in 30 years": store(evil, b, fair(9, lifetime_s=1e9)),
        "expires never": store(evil, b, wrap(identity(9), CELL, record(9), float("inf"))),
        "expiry is no number": store(evil, b, wrap(identity(9), CELL, record(9), float("nan"))),
        "oversized": store(evil, b, fair(9, body=bytes(5000))),
        "no record": store(evil, b, fair(9, body=b"senseless")),
        "regular value": store(evil, b, mine, subkey=b""),
        "text subkey": store(evil, b, mine, subkey="peer"),
        "other key": store(evil, b, fair(9, name="other"), name="other"),
        "cache entry": store(evil, b, mine, in_cache=True),
    }
    assert {name: await attempt for name, attempt in refused.items()} == dict.fromkeys(
        refused, False
    )
    whole = DictionaryDHTValue()
    whole.store(mine.subkey, mine.value, mine.expires_s)
    answer = await evil.call_store(
        target(b), [DHTID.from_bytes(key_hash(CELL))], [whole], [mine.expires_s]
    )
    assert not any(answer or [])
    assert await store(evil, b, mine), (
        "the fair one is taken, so the others were refused for their faults"
    )
    assert set(await b.peers(RUN)) == {record(1), record(9)}


@in_loop
async def test_a_flood_is_stopped_by_the_quota_and_does_not_cost_others_theirs(stack, folder):
    a, b = await swarm(stack, folder, 2)
    evil = await hostile(stack, [a, b])
    before_s = time.monotonic()
    answered = 0
    for more_s in range(1, 41):
        batch = [
            wrap(identity(9), CELL, record(9), time.time() + more_s / 10 + k / 1000 + 5)
            for k in range(16)
        ]
        keys = [DHTID.from_bytes(key_hash(CELL))] * 16
        values, subkeys = [item.value for item in batch], [item.subkey for item in batch]
        expiries_s = [item.expires_s for item in batch]
        answered += (
            await evil.call_store(target(b), keys, values, expiries_s, subkeys=subkeys) is not None
        )
    budget = BURST_UNITS + UNITS_PER_S * (time.monotonic() - before_s)
    assert answered > 10
    assert answered * 16 <= budget
    assert b.protocol.shelf.items_stored <= 2
    assert await a.announce(RUN, record(1))
    assert record(1) in await b.peers(RUN)


@in_loop
async def test_calls_that_break_a_limit_are_refused_and_the_peer_goes_on(stack, folder):
    a, b = await swarm(stack, folder, 2)
    evil = await hostile(stack, [a, b], max_message_bytes=2**24)
    stub, me = evil.get_stub(target(b)), dht_pb2.NodeInfo(node_id=evil.node_id.to_bytes())
    breaking = [
        stub.rpc_find(dht_pb2.FindRequest(keys=[bytes(20)] * 17, peer=me), timeout=2),
        stub.rpc_find(dht_pb2.FindRequest(keys=[bytes(19)], peer=me), timeout=2),
        stub.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=bytes(21))), timeout=2),
        stub.rpc_store(dht_pb2.StoreRequest(keys=[bytes(20)], peer=me), timeout=2),
        stub.rpc_store(dht_pb2.StoreRequest(values=[bytes(2**21)], peer=me), timeout=0.5),
    ]
    for call in breaking:
        with pytest.raises(Exception, match=r"RefusedCall|^$"):
            await call
    assert await store(evil, b, fair(9))


def speaking(answer):
    """A protocol whose find replies come from `answer(key) -> FindResult`."""

    class DHTProtocol(PlainProtocol):
        async def rpc_find(
            self, request: dht_pb2.FindRequest, context: P2PContext
        ) -> dht_pb2.FindResponse:
            return dht_pb2.FindResponse(
                results=[answer(key) for key in request.keys], peer=self.node_info
            )

    return DHTProtocol


def dictionary(items, expires_s=float("inf"), **near):
    kind = dht_pb2.FOUND_DICTIONARY
    return dht_pb2.FindResult(type=kind, value=pack_items(items), expiration_time=expires_s, **near)


REPLIES = {
    "an empty dictionary that never expires": lambda key: dictionary([]),
    "a victim's subkey with another's value": lambda key: dictionary(
        [fair(9)._replace(subkey=identity(1).public)]
    ),
    "a victim's value with a later expiry": lambda key: dictionary(
        [fair(1)._replace(expires_s=time.time() + 500)]
    ),
    "an item that never expires": lambda key: dictionary(
        [wrap(identity(9), CELL, record(9), float("inf"))]
    ),
    "a forged item beside a fair one": lambda key: dictionary(
        [fair(8)._replace(subkey=identity(2).public), fair(9)]
    ),
    "a regular value": lambda key: dht_pb2.FindResult(
        type=dht_pb2.FOUND_REGULAR, value=fair(9).value, expiration_time=float("inf")
    ),
    "garbage": lambda key: dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=b"\xc7\x01\x50\xc1" * 50
    ),
    "neighbours nearer to the key than anybody": lambda key: dictionary(
        [],
        nearest_node_ids=[(int.from_bytes(key) ^ near).to_bytes(20) for near in range(20)],
        nearest_peer_ids=[b"\x00\x24\x08\x01\x12\x20" + bytes([near]) * 32 for near in range(20)],
    ),
    "a neighbour whose id takes for ever to print": lambda key: dictionary(
        [], nearest_node_ids=[bytes(20)], nearest_peer_ids=[b"\xff" * 500_000]
    ),
    "neighbours without ids": lambda key: dictionary([], nearest_node_ids=[bytes(20)] * 3),
    "a node id out of range": lambda key: dictionary(
        [], nearest_node_ids=[b"\xff" * 21], nearest_peer_ids=[b"p"]
    ),
}


@in_loop
async def test_no_reply_of_a_hostile_peer_hides_or_changes_the_honest_records(stack, folder):
    a, b, c = await swarm(stack, folder, 3)
    for number, directory in enumerate((a, b), start=1):
        await directory.announce(RUN, record(number))
    asked, now = [], {}

    def answer(key):
        asked.append(key)
        return now["reply"](key)

    evil = await hostile(stack, [a, b, c], speaking(answer))
    reader = await opened(stack, folder, 4, [*a.addresses, *c.addresses])
    for name, now["reply"] in REPLIES.items():
        await evil.call_ping(target(reader))
        asked.clear()
        seen = set(await reader.peers(RUN, timeout_s=LIMIT_S))
        assert asked, f"the hostile peer was not asked: {name}"
        assert {record(1), record(2)} <= seen <= {record(1), record(2), record(9)}, name
        assert (record(9) in seen) == ("fair one" in name), name


@in_loop
async def test_no_peer_takes_or_clears_anothers_place_in_the_table(stack, folder):
    a, b = await swarm(stack, folder, 2)
    evil = await hostile(stack, [a, b])
    table, victim = a.protocol.routing_table, b.protocol.node_id
    stub = evil.get_stub(target(a))
    for validate in (False, True):
        claim = dht_pb2.NodeInfo(node_id=victim.to_bytes())
        await stub.rpc_ping(dht_pb2.PingRequest(peer=claim, validate=validate), timeout=LIMIT_S)
        await asyncio.sleep(0)
        assert table.get(node_id=victim) == target(b)
    await evil.call_ping(target(a))
    for number in range(50):
        claim = dht_pb2.NodeInfo(node_id=bytes([number]) * 20)
        await stub.rpc_ping(dht_pb2.PingRequest(peer=claim), timeout=LIMIT_S)
    assert len(table.uid_to_peer_id) == 2


@in_loop
async def test_the_table_and_the_contacts_are_bounded(stack, folder):
    a = await opened(stack, folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dht, "MAX_TABLE_PEERS", 5)
        patch.setattr(dht, "MAX_CONTACTS", 3)
        for number in range(1, 20):
            await a.protocol.update_routing_table(DHTID(number), PeerID(bytes([number])))
    assert len(a.protocol.routing_table.uid_to_peer_id) == 5
    assert list(a.protocol.contacts) == [PeerID(bytes([number])) for number in (3, 4, 5)]


@in_loop
async def test_strangers_and_node_ids_on_a_bucket_s_border_can_be_removed_from_a_split_table(
    stack, folder
):
    a = await opened(stack, folder, 1)
    update, table = a.protocol.update_routing_table, a.protocol.routing_table
    border = DHTID(2**159)
    peers = {
        DHTID.generate(source=bytes([number])): PeerID(bytes([number])) for number in range(60)
    }
    for node_id, peer in ({border: PeerID(b"border")} | peers).items():
        await update(node_id, peer)
    assert len(table.buckets) > 1
    for peer in (PeerID(b"stranger"), PeerID(b"border"), *peers.values()):
        await update(None, peer, responded=False)
    assert not any(peer in table for peer in peers.values())


@in_loop
async def test_a_peer_whose_table_ran_empty_finds_its_way_back(stack, folder):
    a, b, c = await swarm(stack, folder, 3)
    await c.announce(RUN, record(3))
    for directory in (a, b):  # a knows b and c by contact only, b has an invite with a's address
        for peer in list(directory.protocol.routing_table.peer_id_to_uid):
            await directory.protocol.update_routing_table(None, peer, responded=False)
        assert not directory.protocol.routing_table.uid_to_peer_id
        assert record(3) in await directory.peers(RUN)
        assert directory.protocol.routing_table.uid_to_peer_id


@in_loop
async def test_a_peer_that_is_gone_costs_others_one_call_and_then_nothing(stack, folder):
    a, b, c = await swarm(stack, folder, 3)
    await a.announce(RUN, record(1))
    await b.close()
    assert record(1) in await c.peers(RUN)
    assert target(b) not in c.protocol.routing_table.peer_id_to_uid
    assert await c.announce(RUN, record(3))
    assert record(1) in await c.peers(RUN)


@in_loop
async def test_one_identity_cannot_run_twice(stack, folder):
    a = await opened(stack, folder, 1)
    with pytest.raises(IdentityInUse, match=r"key-1: another running peer \(process \d+\) uses"):
        await DhtDirectory.open(key_file(folder, 1), run=RUN)
    await a.close()
    await opened(stack, folder, 1)


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([UNREACHABLE], "none of the 1 peers in the invite could be reached.*fresh invite"),
        (["rubbish"], "'rubbish' is not the address of a peer"),
        (["/ip4/127.0.0.1/tcp/1"], "is not the address of a peer"),
        (
            ["/ip4/127.0.0.1/tcp/1,/ip4/127.0.0.1/tcp/2" + UNREACHABLE[20:]],
            "is not the address of a peer",
        ),
        (["/ip4/1.2.3/tcp/1" + UNREACHABLE[20:]], "the libp2p daemon ended.*1.2.3"),
        ([UNREACHABLE] * 17, "17 addresses, and at most 16 are allowed"),
        (["/" * 1000 + UNREACHABLE], "is not the address of a peer"),
    ],
)
def test_an_invite_that_leads_nowhere_is_explained_and_leaves_nothing(
    tmp_path, monkeypatch, addresses, message
):
    monkeypatch.setattr(daemon, "DOOR_WAITS_S", (0.1, 0.1, 0.1))

    @in_loop
    async def attempt(stack, folder):
        with pytest.raises(DirectoryUnreachable, match=message):
            await DhtDirectory.open(key_file(folder, 1), run=RUN, initial_peers=addresses)
        await opened(stack, folder, 1)

    attempt(tmp_path)


@in_loop
async def test_a_peer_of_the_invite_that_does_not_answer_at_once_is_tried_again(stack, folder):
    a = await opened(stack, folder, 1)
    (address,) = a.addresses
    await a.close()
    attempts, start = [], BoundDaemon.start

    async def watched(sockets, **options):
        attempts.append(options)
        try:
            return await start(sockets, **options)
        except P2PDaemonError:  # now the peer of the invite starts
            if len(attempts) == 1:
                await opened(stack, folder, 1, listen=[address.partition("/p2p/")[0]])
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundDaemon, "start", watched)
        b = await opened(stack, folder, 2, [address])
    assert len(attempts) == 3  # one of them is that of the peer of the invite
    assert await b.announce(RUN, record(2))


@in_loop
async def test_a_taken_port_is_explained(stack, folder):
    a = await opened(stack, folder, 1)
    taken = a.addresses[0].partition("/p2p/")[0]
    with pytest.raises(
        PortTaken, match=r"another program uses port .*; stop that program, or choose another"
    ):
        await DhtDirectory.open(key_file(folder, 2), run=RUN, listen=[taken])
    await a.close()
    b = await opened(stack, folder, 2, listen=[taken])
    assert b.addresses == (f"{taken}/p2p/{identity(2).peer}",)


@in_loop
async def test_an_address_that_is_not_this_machine_s_is_explained(stack, folder):
    with pytest.raises(
        DirectoryUnreachable, match=r"the libp2p daemon ended.*check that the port is free"
    ):
        await DhtDirectory.open(key_file(folder, 1), run=RUN, listen=["/ip4/192.0.2.1/tcp/4001"])


@in_loop
async def test_an_open_that_takes_too_long_is_ended_and_leaves_nothing(stack, folder):
    with pytest.raises(DirectoryUnreachable, match="did not open within 0 s"):
        await DhtDirectory.open(key_file(folder, 1), run=RUN, timeout_s=0.02)
    assert not daemons()
    await opened(stack, folder, 1)


@in_loop
async def test_one_dead_address_among_several_does_no_harm_nor_does_my_own(stack, folder):
    a = await opened(stack, folder, 1)
    own = "/ip4/127.0.0.1/tcp/1/p2p/" + identity(2).peer
    b = await opened(stack, folder, 2, [UNREACHABLE, *a.addresses, own])
    await a.announce(RUN, record(1))
    assert await b.peers(RUN) == [record(1)]


@in_loop
async def test_a_wrong_clock_is_explained_at_joining(stack, folder):
    a = await opened(stack, folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dht, "wall_s", lambda: time.time() + 100)
        with pytest.raises(ClockSkew, match=r"\d+\.\d s ahead of the swarm's.*NTP"):
            await DhtDirectory.open(key_file(folder, 2), run=RUN, initial_peers=a.addresses)
    assert len(daemons()) == 1


@in_loop
async def test_a_peer_that_cannot_be_dialled_back_is_told_so(stack, folder):
    class DHTProtocol(PlainProtocol):
        async def rpc_ping(
            self, request: dht_pb2.PingRequest, context: P2PContext
        ) -> dht_pb2.PingResponse:
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=time.time(), available=False)

    a = await opened(stack, folder, 1)
    mute = await hostile(stack, [a], DHTProtocol)
    door = str((await mute.p2p.get_visible_maddrs())[0])
    with pytest.raises(DirectoryUnreachable, match="1 of 1 peers could not dial this machine back"):
        await DhtDirectory.open(key_file(folder, 2), run=RUN, initial_peers=[door])
    await opened(stack, folder, 2, [door], client_mode=True)


@in_loop
async def test_closing_ends_what_is_in_flight(stack, folder):
    a, b = await swarm(stack, folder, 2)
    async with stopped(b):
        calls = [
            asyncio.create_task(call)
            for call in (a.announce(RUN, record(1)), a.peers(RUN), a.confirm_visible())
        ]
        await asyncio.sleep(0.1)
        await a.close()
        assert await asyncio.gather(*calls) == [False, [record(1)], False]
    assert not a.alive
    await a.close()


@in_loop
async def test_calls_keep_their_deadline_when_no_peer_answers(stack, folder):
    a, b = await swarm(stack, folder, 2)
    async with stopped(b):
        assert not await a.announce(RUN, record(1), timeout_s=0.4)
        assert await a.peers(RUN, timeout_s=0.2) == [record(1)]


@in_loop
async def test_the_end_of_the_daemon_is_noticed(stack, folder):
    a, b = await swarm(stack, folder, 2)
    assert a.alive
    psutil.Process(a.daemon_pid).kill()
    await until(lambda: not a.alive, every_s=0.01)
    assert not await a.announce(RUN, record(1), timeout_s=0.5)
    assert b.alive


def test_no_thread_outlives_a_closed_directory(tmp_path):
    before = set(threading.enumerate())

    @in_loop
    async def open_and_close(stack, folder):
        await opened(stack, folder, 1)

    open_and_close(tmp_path)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
    assert set(threading.enumerate()) <= before


def test_other_users_of_hivemind_in_the_process_keep_their_protocol():
    assert hivemind.dht.node.DHTProtocol is PlainProtocol
    assert dht.DHTProtocol.__name__ == PlainProtocol.__name__ == "DHTProtocol"


def test_our_form_of_a_dictionary_is_hivemind_s():
    items = [
        StoredItem(identity(number).public, b"\xc4\x01v", time.time() + 60 + number)
        for number in (1, 2)
    ]
    theirs = MSGPackSerializer.loads(pack_items(items))
    assert [StoredItem(subkey, *entry) for subkey, entry in theirs.items()] == items
    assert MSGPackSerializer.dumps(theirs) == pack_items(items)
    assert unpack_items(MSGPackSerializer.dumps(theirs)) == items
    assert DHTID.generate(source=HEAD).to_bytes() == key_hash(HEAD)


def test_only_the_directory_itself_imports_hivemind():
    modules = sorted(
        {path.stem for path in Path(dht.__file__).parent.glob("*.py")}
        - {"__init__", "kademlia", "daemon"}
    )
    script = (
        "import sys, importlib; "
        f"[importlib.import_module('farflock.swarm.dht.' + m) for m in {modules}];"
    )
    script += "sys.exit('hivemind' in sys.modules or 'torch' in sys.modules)"
    assert len(modules) >= 5
    assert completed([sys.executable, "-c", script], check=False).returncode == 0


@in_loop
async def test_a_daemon_that_dies_or_whose_sockets_are_removed_says_so(stack, folder):
    a, b = await opened(stack, folder, 1), await opened(stack, folder, 2)
    assert (await a.trouble(), await b.trouble()) == ("", "")
    listens = " ".join(psutil.Process(a.daemon_pid).cmdline())
    os.remove(re.search(r"/tmp/hivemind-p2pd-[^ ]+\.sock", listens)[0])
    assert (await a.trouble()).endswith("socket in /tmp was removed")
    os.kill(b.daemon_pid, signal.SIGKILL)
    await until(lambda: not b.alive, what="the end of the daemon")
    assert await b.trouble() == f"the libp2p daemon (process {b.daemon_pid}) has ended"


@in_loop
async def test_a_daemon_that_may_not_be_executed_is_named(stack, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, how: how != os.X_OK)
        patch.setattr(dht, "place_for_sockets", lambda key_file: Path("/tmp"))
        with pytest.raises(DirectoryUnreachable, match=r"p2pd may not be executed: .* noexec"):
            await opened(stack, folder, 1)
