"""The directory over libp2p: hivemind's daemon and Kademlia protocol inside our own event loop.

Only this module and `daemon` import hivemind, and with it torch: import them as late as possible.
Next to them: layout and rules of the table (`validator`), stored items (`item_store`), the search
(`lookup`), judgement of the first answers (`greeting`), locks and sockets (`files`).

Of hivemind we use `P2P` (the libp2p daemon and its calls), the routing table and `DHTProtocol`'s
messages, so that any hivemind peer can read the table. We do not use `hivemind.DHT` (a forked
process that hangs on values from 16 kB) nor `DHTNode`: its search believes unsigned expiries and
made-up neighbours, one exception in it blocks a read forever, and another protocol class would
change it for the whole process.

Everything here runs in the event loop that called `open`; the daemon dies with that loop's thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from hivemind.dht.protocol import DHTProtocol as HivemindProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2

# Expiries are wall-clock times, as everywhere in hivemind's table.
from hivemind.utils import get_dht_time as wall_s
from hivemind.utils.auth import AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from farflock.swarm.dht.daemon import BoundDaemon, finds_no_door
from farflock.swarm.dht.files import (
    IdentityLock,
    place_for_sockets,
    refuse_taken_ports,
    remove_dead_sockets,
)
from farflock.swarm.dht.greeting import DirectoryUnreachable, Greeting, clock_ahead_s, judge
from farflock.swarm.dht.item_store import ItemStore, StoredItem
from farflock.swarm.dht.lookup import WIDTH, LookupReply, Walk
from farflock.swarm.dht.validator import (
    CLOCK_SLACK_S,
    MAX_HEAD_BYTES,
    BadItem,
    Rules,
    cell_name,
    cell_of,
    head_name,
    key_hash,
    pack_items,
    pack_subkey,
    unpack_items,
    unwrap,
    wrap,
)
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import BadIdentity, Identity, public_key
from farflock.swarm.quota import Quota, units
from farflock.swarm.record import BadRecord, unseal

OPEN_TIMEOUT_S = 90.0
DAEMON_START_TIMEOUT_S = 60.0
DAEMON_IDLE_TIMEOUT_S = 30.0  # a daemon without a client ends by itself after this time
GREETING_TIMEOUT_S = 10.0  # longer than a call: the greeted peer dials back before it answers
CALL_TIMEOUT_S = 3.0
STORE_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 15.0

REPLICAS = 5
HEAD_LIFETIME_S = 300.0
BUCKET_SIZE = 20
DEPTH_MODULO = 5
PARALLEL_CALLS = 64
MAX_MESSAGE_BYTES = 2**20  # the daemon drops longer ones before they reach this process
MAX_REPLY_BYTES = 3 * 2**18
MAX_KEYS_PER_CALL = 16
MAX_TABLE_PEERS = 2048
MAX_CONTACTS = 64
MAX_INITIAL_PEERS = 16
MAX_ADDRESS_CHARS = 256
MAX_PEER_ID_BYTES = 64

_log = logging.getLogger(__name__)


class RunValidator(RecordValidatorBase):  # type: ignore[misc]
    """The rules of a run's table as a hivemind validator, also for a plain `hivemind.DHT`."""

    def __init__(self, run: str) -> None:
        self._rules = Rules(run)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the record may be stored or believed."""
        if record.subkey[:2] != pack_subkey(b"") or len(record.subkey) != 34:
            return False
        item = StoredItem(record.subkey[2:], record.value, record.expiration_time)
        return self._rules.allows(record.key, item, wall_s())


class RefusedCall(RuntimeError):
    """A remote call that breaks a limit; only its caller is told."""


class DHTProtocol(HivemindProtocol):  # type: ignore[misc]
    """hivemind's protocol with limits on what strangers may store, ask and claim.

    The class's name is part of the calls' names on the wire, and hivemind reads the annotations of
    the `rpc_` methods: keep both. hivemind's own `storage` and `cache` stay empty, so new peers are
    handed nothing: owners re-announce within seconds, and no peer can collect all items by
    appearing under many names.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.shelf, self.quota, self.closed = ItemStore(), Quota(), False
        self.contacts: dict[PeerID, None] = {}  # the last peers heard, to reconnect after an outage

    def get_stub(self, peer: PeerID) -> AuthRPCWrapper:
        """Return hivemind's stub; raise `RefusedCall` once the directory is closing."""
        if self.closed:
            raise RefusedCall("the directory is closed")
        return super().get_stub(peer)

    async def greet(self, peer: PeerID) -> Greeting | None:
        """Introduce this peer; return the answer, or None without one."""
        request = dht_pb2.PingRequest(peer=self.node_info, validate=True)
        sent_s = wall_s()
        try:
            response = await self.get_stub(peer).rpc_ping(request, timeout=GREETING_TIMEOUT_S)
            node_id = DHTID.from_bytes(response.peer.node_id)
        except Exception:  # an answer that breaks anything is no answer
            _log.debug("no greeting from %s", peer, exc_info=True)
            return None
        await self.update_routing_table(node_id, peer)
        return Greeting(
            clock_ahead_s(sent_s, wall_s(), response.dht_time), bool(response.available)
        )

    async def ask(self, peer: PeerID, key: bytes) -> LookupReply[PeerID] | None:
        """Return the peer's checked items under a key and its neighbours; None if it is silent."""
        request = dht_pb2.FindRequest(keys=[key], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            (result,) = response.results
            node_id, reply = DHTID.from_bytes(response.peer.node_id), self._believe(key, result)
        except Exception:  # as above; it must not end the search for all other peers
            _log.debug("no answer from %s", peer, exc_info=True)
            await self.update_routing_table(None, peer, responded=False)
            return None
        await self.update_routing_table(node_id, peer)
        return reply

    def _believe(self, key: bytes, result: dht_pb2.FindResult) -> LookupReply[PeerID]:
        found = unpack_items(result.value) if result.type == dht_pb2.FOUND_DICTIONARY else []
        near = list(
            zip(result.nearest_node_ids[:WIDTH], result.nearest_peer_ids[:WIDTH], strict=True)
        )
        # Base58 takes quadratic time.
        if any(len(peer) > MAX_PEER_ID_BYTES for _, peer in near):
            raise BadItem("a neighbour's peer id is too long")
        return LookupReply(
            [item for item in found if self._allows(key, item)],
            [(DHTID.from_bytes(node), PeerID(peer)) for node, peer in near],
        )

    def _allows(self, key: bytes, item: StoredItem) -> bool:
        record = DHTRecord(key, pack_subkey(item.subkey), item.value, item.expires_s)
        return bool(self.record_validator.validate(record))

    def keep(self, key: bytes, item: StoredItem) -> bool:
        """Store an item here if the rules and the room allow it."""
        return self._allows(key, item) and self.shelf.put(key, item, wall_s())

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        """Answer a peer that introduces itself or checks that we are alive."""
        self._pay(context, 1, 0)
        if len(request.peer.node_id) not in (0, DHTID.HASH_NBYTES):
            raise RefusedCall(
                f"a node id has {DHTID.HASH_NBYTES} bytes, got {len(request.peer.node_id)}"
            )
        return await super().rpc_ping(request, context)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        """Store single items; refuse regular values, dictionaries and cache entries."""
        self._pay(context, len(request.keys), request.ByteSize())
        columns = (
            request.keys,
            request.subkeys,
            request.values,
            request.expiration_time,
            request.in_cache,
        )
        if len(request.keys) > MAX_KEYS_PER_CALL or len({len(column) for column in columns}) != 1:
            raise RefusedCall(
                f"a store has at most {MAX_KEYS_PER_CALL} items in columns of equal length"
            )
        await self._meet(request.peer, context)
        kept = [
            not in_cache
            and subkey[:2] == pack_subkey(b"")
            and self.keep(key, StoredItem(subkey[2:], value, expires_s))
            for key, subkey, value, expires_s, in_cache in zip(*columns, strict=True)
        ]
        return dht_pb2.StoreResponse(store_ok=kept, peer=self.node_info)

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """Answer a search: our items under each key, and the peers that we know near it."""
        if len(request.keys) > MAX_KEYS_PER_CALL or any(
            len(key) != DHTID.HASH_NBYTES for key in request.keys
        ):
            raise RefusedCall(
                f"a search has at most {MAX_KEYS_PER_CALL} keys of {DHTID.HASH_NBYTES} bytes"
            )
        found = [self.shelf.items(key, wall_s()) for key in request.keys]
        reply_bytes = sum(len(item.value) + len(item.subkey) for items in found for item in items)
        self._pay(context, len(request.keys), reply_bytes)
        if reply_bytes > MAX_REPLY_BYTES:
            raise RefusedCall(f"a reply has at most {MAX_REPLY_BYTES} bytes; ask for fewer keys")
        await self._meet(request.peer, context)
        results = [self._result(key, items) for key, items in zip(request.keys, found, strict=True)]
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    def _result(self, key: bytes, items: list[StoredItem]) -> dht_pb2.FindResult:
        near = self.routing_table.get_nearest_neighbors(DHTID.from_bytes(key), WIDTH)
        result = dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[node.to_bytes() for node, _ in near],
            nearest_peer_ids=[peer.to_bytes() for _, peer in near],
        )
        if items:
            result.type, result.value = dht_pb2.FOUND_DICTIONARY, pack_items(items)
            result.expiration_time = max(item.expires_s for item in items)
        return result

    def _pay(self, context: P2PContext, calls: int, size_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self.quota.take(context.remote_id.to_bytes(), units(calls, size_bytes), now_s):
            raise RefusedCall("over quota; ask again later")

    async def _meet(self, peer: dht_pb2.NodeInfo, context: P2PContext) -> None:
        if len(peer.node_id) == DHTID.HASH_NBYTES:
            await self.update_routing_table(DHTID.from_bytes(peer.node_id), context.remote_id)

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Add a peer that answered or called; remove one that did not answer.

        Each peer has one node id and each node id one peer: otherwise anyone could take or clear
        another's place by claiming its node id. Our table is bounded; hivemind's list of
        replacements is not.
        """
        table = self.routing_table
        known = table.get(peer_id=peer_id)
        if not responded:
            if known is not None:
                # hivemind's buckets lose a node id that lies on a bucket's border.
                with contextlib.suppress(KeyError):
                    del table[known]
            return
        if self.closed or node_id is None or node_id == self.node_id:
            return
        if known not in (None, node_id) or table.get(node_id=node_id) not in (None, peer_id):
            return
        if known is None and len(table.uid_to_peer_id) >= MAX_TABLE_PEERS:
            return
        self.contacts.pop(peer_id, None)
        self.contacts[peer_id] = None
        if len(self.contacts) > MAX_CONTACTS:
            del self.contacts[next(iter(self.contacts))]
        await super().update_routing_table(node_id, peer_id)


class DhtDirectory:
    """`Directory` over a real libp2p table: one run, one identity, one event loop.

    Every call ends by its deadline and returns what it found or reached by then.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        daemon: BoundDaemon,
        protocol: DHTProtocol,
        lock: IdentityLock | None,
        doors: dict[PeerID, list[str]],
        cells: int,
    ) -> None:
        """Use `open`."""
        self._identity, self._run, self._cells = identity, run, cells
        self._daemon, self._protocol, self._lock = daemon, protocol, lock
        self._doors = doors
        self._announced: StoredItem | None = None
        self._expiries_s: dict[str, float] = {}
        self.addresses: tuple[str, ...] = ()

    @classmethod
    async def open(
        cls,
        identity_path: Path,
        *,
        run: str,
        initial_peers: Sequence[str] = (),
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_as: Sequence[str] = (),
        client_mode: bool = False,
        cells: int = 1,
        auto_nat: bool = False,
        use_relay: bool = False,
        timeout_s: float = OPEN_TIMEOUT_S,
        locked: bool = False,
    ) -> "DhtDirectory":
        """Start a daemon with the key in `identity_path` and join the table of `run`.

        `initial_peers` are multiaddresses that end in `/p2p/ID` (none: start a new table), `listen`
        and `announce_as` multiaddresses without id. A peer in `client_mode` cannot be dialled: it
        reads and announces, but stores nothing for others. `cells`: see `validator`. The key file
        is locked, unless the caller has `locked` it. Raise
        `BadIdentity`, `IdentityInUse`, `PortTaken`, `ClockSkew` or `DirectoryUnreachable`; then
        nothing is left running.
        """
        identity = Identity.load(identity_path)
        cell_of(identity.public, cells)  # raises for a bad number before anything starts
        doors = _parse_doors(initial_peers, identity)
        refuse_taken_ports(() if client_mode else listen)
        sockets = place_for_sockets(identity_path)
        lock = None if locked else IdentityLock(identity_path)
        daemon = None
        try:
            remove_dead_sockets(sockets, wall_s())
            async with asyncio.timeout(timeout_s):
                daemon = await BoundDaemon.start_patiently(
                    sockets,
                    initial_peers=[
                        address for addresses in doors.values() for address in addresses
                    ],
                    identity_path=str(identity_path),
                    check_if_identity_free=False,  # it reads RSA keys only; the lock replaces it
                    host_maddrs=None if client_mode else list(listen),
                    announce_maddrs=list(announce_as) or None,
                    no_listen=client_mode,
                    dht_mode="client" if client_mode else "server",
                    auto_nat=auto_nat,
                    use_relay=use_relay,
                    nat_port_map=False,
                    startup_timeout=DAEMON_START_TIMEOUT_S,
                    idle_timeout=DAEMON_IDLE_TIMEOUT_S,
                    persistent_conn_max_msg_size=MAX_MESSAGE_BYTES,
                )
                protocol = await _speak(daemon, identity, run, client_mode)
                self = cls(identity, run, daemon, protocol, lock, doors, cells)
                await self._join(client_mode)
        except BaseException as error:
            if daemon is not None:
                await daemon.stop()
            if lock is not None:
                lock.release()
            if isinstance(error, TimeoutError | P2PDaemonError | EOFError):
                raise _explained(error, timeout_s, len(doors)) from error
            raise
        return self

    async def _join(self, client_mode: bool) -> None:
        with contextlib.suppress(ValueError):  # hivemind raises it if there are none
            self.addresses = tuple(
                str(address) for address in await self._daemon.get_visible_maddrs()
            )
        if self._doors:
            greetings = await asyncio.gather(*map(self._protocol.greet, self._doors))
            judge(
                len(self._doors),
                [greeting for greeting in greetings if greeting is not None],
                client_mode,
            )
            await self._walk(self._protocol.node_id.to_bytes(), STORE_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        """False once the daemon is gone and nothing can be reached; close and open again."""
        return not self._protocol.closed and not self._daemon.deaf

    async def trouble(self) -> str:
        """Return why it must be closed and opened again, as a clause; nothing if it serves."""
        return await self._daemon.trouble()

    @property
    def protocol(self) -> DHTProtocol:
        """The messages of the DHT: its routing table, its contacts, and the items stored here."""
        return self._protocol

    @property
    def me(self) -> str:
        """The id of this peer."""
        return self._identity.peer

    @property
    def daemon_pid(self) -> int:
        """The process id of the libp2p daemon."""
        return self._daemon.pid

    async def announce(self, run: str, record: bytes, timeout_s: float = STORE_TIMEOUT_S) -> bool:
        """Store my sealed record until it expires; return False if only this peer holds it.

        Raise `BadRecord` for a record that is not mine or not of this run.
        """
        self._only(run)
        mine = unseal(record, run)
        if mine.peer != self._identity.peer:
            raise BadRecord(f"{self._identity.peer} cannot announce a record of {mine.peer}")
        name = cell_name(run, cell_of(self._identity.public, self._cells))
        self._announced = self._wrap(name, record, mine.lifetime_s)
        return await self._put(name, self._announced, timeout_s)

    async def peers(self, run: str, timeout_s: float = READ_TIMEOUT_S) -> list[bytes]:
        """Return each owner's newest live record in all cells, mine included, by public key."""
        self._only(run)
        return await self._read([cell_name(run, cell) for cell in range(self._cells)], timeout_s)

    async def publish_head(self, run: str, head: bytes, timeout_s: float = STORE_TIMEOUT_S) -> bool:
        """Publish the manifest's head for `HEAD_LIFETIME_S`; False if no other peer took it."""
        self._only(run)
        if not 1 <= len(head) <= MAX_HEAD_BYTES:
            raise ValueError(f"a manifest's head has 1 to {MAX_HEAD_BYTES} bytes, got {len(head)}")
        name = head_name(run)
        return await self._put(name, self._wrap(name, head, HEAD_LIFETIME_S), timeout_s)

    async def heads(self, run: str, timeout_s: float = READ_TIMEOUT_S) -> list[bytes]:
        """Return every distinct published head; the caller checks their signatures."""
        self._only(run)
        return sorted(set(await self._read([head_name(run)], timeout_s)))

    async def confirm_visible(self, timeout_s: float = READ_TIMEOUT_S) -> bool:
        """Return whether another peer hands out the record that I announced last."""
        if self._announced is None:
            return False
        name = cell_name(self._run, cell_of(self._identity.public, self._cells))
        walk = await self._walk(key_hash(name), timeout_s)
        return any(self._announced in reply.items for reply in walk.replies)

    async def close(self) -> None:
        """End calls in flight (they return what they have), daemon and tasks; unlock the key."""
        self._protocol.closed = True
        await self._daemon.stop()
        if self._lock is not None:
            self._lock.release()

    def _only(self, run: str) -> None:
        if run != self._run:
            raise ValueError(
                f"this directory was opened for run {self._run}; open another one for run {run}"
            )

    def _wrap(self, name: str, payload: bytes, lifetime_s: float) -> StoredItem:
        """Sign with a rising expiry, so that the last announcement wins whatever its lifetime."""
        now_s = wall_s()
        expires_s = max(now_s + lifetime_s, self._expiries_s.get(name, 0.0) + 0.001)
        self._expiries_s[name] = min(expires_s, now_s + MAX_RECORD_AGE_S - CLOCK_SLACK_S)
        return wrap(self._identity, name, payload, self._expiries_s[name])

    async def _read(self, names: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return each owner's newest item under any of the keys, stored here or elsewhere."""
        keys = [key_hash(name) for name in names]
        newest: dict[bytes, StoredItem] = {}
        walks = await asyncio.gather(*(self._walk(key, timeout_s) for key in keys))
        found = [item for walk in walks for reply in walk.replies for item in reply.items]
        found += [item for key in keys for item in self._protocol.shelf.items(key, wall_s())]
        for item in found:
            if item.subkey not in newest or item.expires_s > newest[item.subkey].expires_s:
                newest[item.subkey] = item
        return [unwrap(newest[subkey]) for subkey in sorted(newest)]

    async def _put(self, name: str, item: StoredItem, timeout_s: float) -> bool:
        """Store at the `REPLICAS` nearest answering peers; return whether another one took it."""
        key, loop = key_hash(name), asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        walk = await self._walk(key, timeout_s / 2)
        me = self._protocol.node_id ^ int.from_bytes(key)
        nearer = sum(node ^ int.from_bytes(key) < me for node, _ in walk.nearest)
        wanted = REPLICAS
        if not self._protocol.client_mode and nearer < REPLICAS:
            wanted -= self._protocol.keep(key, item)
        waiting, kept = [peer for _, peer in walk.nearest], 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_s):
                while waiting and kept < wanted:
                    batch, waiting = waiting[: wanted - kept], waiting[wanted - kept :]
                    kept += sum(
                        await asyncio.gather(*(self._store_at(peer, key, item) for peer in batch))
                    )
        return kept > 0

    async def _store_at(self, peer: PeerID, key: bytes, item: StoredItem) -> bool:
        answer = await self._protocol.call_store(
            peer, [DHTID.from_bytes(key)], [item.value], item.expires_s, subkeys=[item.subkey]
        )
        return bool(answer) and answer[0] is True

    async def _walk(self, key: bytes, timeout_s: float) -> Walk[PeerID]:
        """Search towards a key until the deadline; the walk holds what was found."""
        target, table = int.from_bytes(key), self._protocol.routing_table
        ends_s = asyncio.get_running_loop().time() + timeout_s
        if not table.uid_to_peer_id:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends_s):
                    await self._knock_again()
        friends = table.get_nearest_neighbors(DHTID(target), WIDTH)
        walk = Walk(
            target, self._daemon.peer_id, friends, lambda peer: self._protocol.ask(peer, key)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_s):
                await walk.run()
        return walk

    async def _knock_again(self) -> None:
        """Reconnect after an outage, which removed every silent peer from the table."""
        others = [peer for peer in self._protocol.contacts if peer not in self._doors]
        await asyncio.gather(*map(self._knock, self._doors), *map(self._protocol.greet, others))

    async def _knock(self, door: PeerID) -> None:
        with contextlib.suppress(P2PDaemonError, OSError, ValueError):
            places = [Multiaddr(address.rpartition("/p2p/")[0]) for address in self._doors[door]]
            await self._daemon._client.connect(door, places)
        await self._protocol.greet(door)


def _parse_doors(addresses: Sequence[str], identity: Identity) -> dict[PeerID, list[str]]:
    """Return an invite's addresses by peer, without mine; `DirectoryUnreachable` for a bad one."""
    if len(addresses) > MAX_INITIAL_PEERS:
        raise DirectoryUnreachable(
            f"{len(addresses)} addresses, and at most {MAX_INITIAL_PEERS} are allowed; "
            "ask any member for a fresh invite"
        )
    doors: dict[PeerID, list[str]] = {}
    for address in addresses:
        place, _, peer = address.rpartition("/p2p/")
        try:
            known = public_key(peer) == identity.public
        except BadIdentity as error:
            raise _bad_address(address, str(error)) from None
        if not place.startswith("/") or len(address) > MAX_ADDRESS_CHARS or "," in address:
            raise _bad_address(address, "one has the form /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…")
        if not known:
            doors.setdefault(PeerID.from_base58(peer), []).append(address)
    return doors


def _bad_address(address: str, reason: str) -> DirectoryUnreachable:
    return DirectoryUnreachable(
        f"{address[:MAX_ADDRESS_CHARS]!r} is not the address of a peer: {reason}; "
        "ask any member for a fresh invite"
    )


def _explained(error: BaseException, timeout_s: float, doors: int) -> DirectoryUnreachable:
    if isinstance(error, TimeoutError):
        return DirectoryUnreachable(
            f"the directory did not open within {timeout_s:.0f} s; "
            "check whether this machine is overloaded, and try again"
        )
    if finds_no_door(error):
        return DirectoryUnreachable(
            f"none of the {doors} peers in the invite could be reached; "
            "check this machine's network, or ask any member for a fresh invite"
        )
    return DirectoryUnreachable(
        f"the libp2p daemon ended ({error}); check that the port is free and the address right"
    )


async def _speak(
    daemon: BoundDaemon, identity: Identity, run: str, client_mode: bool
) -> DHTProtocol:
    """Create the protocol; a node id from the key gives a restarted peer its old place back."""
    protocol: DHTProtocol = await DHTProtocol.create(
        daemon,
        DHTID.generate(source=identity.public),
        BUCKET_SIZE,
        DEPTH_MODULO,
        REPLICAS,
        CALL_TIMEOUT_S,
        parallel_rpc=PARALLEL_CALLS,
        client_mode=client_mode,
        record_validator=RunValidator(run),
    )
    return protocol
