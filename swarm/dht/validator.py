"""A run's distributed table: the names of its keys, the signed envelope of an item, and the rules.

Any hivemind client can read the table without this code:

    key      the text `RUN/peers/CELL` or `RUN/head`; on the wire SHA-1 of its msgpack (20 bytes)
    subkey   the writer's Ed25519 public key, 32 bytes (on the wire msgpack bin: c4 20 + key)
    value    bytes (on the wire msgpack bin): signature (64) + payload; the payload is a sealed
             record (swarm/record.py) under `peers`, the manifest's head as made under `head`
    signature  by the subkey's owner, domain `dht`, over the key's hash (20) + expiry (float64,
             big-endian) + payload

The envelope covers the expiry because the table prefers later expiries: otherwise anyone could
replay a victim's old record with a later expiry and so keep the new one out. Only readers that
check are safe: a plain client also sees what a hostile storing peer makes up.

Cells. A peer belongs to the cell `public key[0] mod cells`. The number is a power of two, chosen
so that a cell has at most 64 peers; it is in the manifest, changes slowly and starts at 1. It grows
by doubling: cell c splits into c and c + cells, so a reader with twice the writer's number still
finds every peer. Hence readers adopt a new number at once, writers with their next announcement.
Storing peers accept the owner's cell under every power of two, so they need not know the number.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from farflock.swarm.dht.item_store import MAX_ITEMS_PER_KEY, StoredItem
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, peer_id, verify
from farflock.swarm.messages import MAX_RECORD_BYTES
from farflock.swarm.record import BadRecord, unseal

DOMAIN = b"dht"
MAX_HEAD_BYTES = 2048
MAX_CELLS = 64
CLOCK_SLACK_S = 10.0  # writers stay this far below the maximum age: clocks differ by up to 3 s
MAX_REMEMBERED = 4096  # verified items whose signatures are not checked again

MAX_VALUE_BYTES = 3 + SIGNATURE_BYTES + MAX_RECORD_BYTES
_SUBKEY_HEAD = b"\xc4\x20"  # msgpack bin of 32 bytes
_DICTIONARY = 0x50  # hivemind's msgpack extension type of a dictionary value


class BadItem(ValueError):
    """An item that no honest peer would have written or stored; the message says why."""


def head_name(run: str) -> str:
    """Return the key under which all peers re-publish the manifest's head."""
    return f"{run}/head"


def cell_name(run: str, cell: int) -> str:
    """Return the key of a cell's records."""
    return f"{run}/peers/{cell}"


def cell_of(public: bytes, cells: int) -> int:
    """Return a peer's cell, out of `cells`."""
    if cells not in (1, 2, 4, 8, 16, 32, 64):
        raise ValueError(f"the number of cells is a power of two up to {MAX_CELLS}, got {cells}")
    return public[0] % cells


def key_hash(name: str) -> bytes:
    """Return hivemind's hash of a key's name: SHA-1 of its msgpack form."""
    return hashlib.sha1(msgspec.msgpack.encode(name), usedforsecurity=False).digest()


def pack_subkey(public: bytes) -> bytes:
    """Return a subkey's wire form."""
    return _SUBKEY_HEAD + public


def wrap(identity: Identity, name: str, payload: bytes, expires_s: float) -> StoredItem:
    """Sign our own payload for this key and expiry."""
    signature = identity.sign(DOMAIN, _signed(key_hash(name), expires_s, payload))
    return StoredItem(identity.public, msgspec.msgpack.encode(signature + payload), expires_s)


def unwrap(item: StoredItem) -> bytes:
    """Return the payload of an item that was already checked."""
    return msgspec.msgpack.decode(item.value, type=bytes)[SIGNATURE_BYTES:]


def _signed(key: bytes, expires_s: float, body: bytes) -> bytes:
    return key + struct.pack(">d", expires_s) + body


@dataclass(slots=True)
class Rules:
    """Decides whether an item of one run may be stored or believed; caches verified signatures."""

    run: str
    _cells: dict[bytes, int] = field(default_factory=dict)
    _head: bytes = b""
    _verified: dict[bytes, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cells = {key_hash(cell_name(self.run, cell)): cell for cell in range(MAX_CELLS)}
        self._head = key_hash(head_name(self.run))

    @property
    def remembered(self) -> int:
        """The number of items whose signatures are not verified again."""
        return len(self._verified)

    def check(self, key: bytes, item: StoredItem, now_s: float) -> None:
        """Raise `BadItem` unless the item is valid under this key now; signatures come last."""
        if key not in self._cells and key != self._head:
            raise BadItem(f"no key of run {self.run[:16]}")
        if len(item.subkey) != 32:
            raise BadItem(f"a subkey is a public key of 32 bytes, got {len(item.subkey)}")
        if len(item.value) > MAX_VALUE_BYTES:
            raise BadItem(f"a value has at most {MAX_VALUE_BYTES} bytes, got {len(item.value)}")
        if not now_s < item.expires_s <= now_s + MAX_RECORD_AGE_S:  # also refuses NaN
            raise BadItem(
                f"an item expires within {MAX_RECORD_AGE_S} s, got {item.expires_s - now_s} s"
            )
        memo = hashlib.sha256(
            key + item.subkey + struct.pack(">d", item.expires_s) + item.value
        ).digest()
        if memo not in self._verified:
            self._check_signatures(key, item)
            self._remember(memo)

    def allows(self, key: bytes, item: StoredItem, now_s: float) -> bool:
        """Return whether `check` passes; never raise on hostile input."""
        try:
            self.check(key, item, now_s)
        except BadItem:
            return False
        return True

    def _check_signatures(self, key: bytes, item: StoredItem) -> None:
        try:
            content = msgspec.msgpack.decode(item.value, type=bytes)
        except msgspec.MsgspecError as error:
            raise BadItem(f"a value is msgpack bin: {error}") from None
        if msgspec.msgpack.encode(content) != item.value:
            raise BadItem("a value is msgpack bin in its shortest form")
        signature, body = content[:SIGNATURE_BYTES], content[SIGNATURE_BYTES:]
        owner = peer_id(item.subkey)
        if not verify(owner, DOMAIN, _signed(key, item.expires_s, body), signature):
            raise BadItem(f"not signed by {owner} for this key and expiry")
        self._check_payload(key, item.subkey, body)

    def _check_payload(self, key: bytes, public: bytes, body: bytes) -> None:
        if key == self._head:
            if not 1 <= len(body) <= MAX_HEAD_BYTES:
                raise BadItem(f"a manifest's head has 1 to {MAX_HEAD_BYTES} bytes, got {len(body)}")
            return
        try:
            record = unseal(body, self.run)
        except BadRecord as error:
            raise BadItem(str(error)) from None
        if record.peer != peer_id(public):
            raise BadItem(f"a record of {record.peer} under the subkey of {peer_id(public)}")
        if self._cells[key] not in {public[0] % 2**bits for bits in range(MAX_CELLS.bit_length())}:
            raise BadItem(f"{record.peer} does not belong to cell {self._cells[key]}")

    def _remember(self, memo: bytes) -> None:
        self._verified[memo] = None
        if len(self._verified) > MAX_REMEMBERED:
            del self._verified[next(iter(self._verified))]


_Entry = tuple[
    Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)],
    Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)],
    float,
]
_Entries = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_ITEMS_PER_KEY)]
_extension = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_dictionary = msgspec.msgpack.Decoder(tuple[float, float, _Entries])
_entry = msgspec.msgpack.Decoder(_Entry)


def pack_items(items: list[StoredItem]) -> bytes:
    """Return hivemind's extension 0x50 of [inf, latest expiry, [[subkey, value, expiry]]]."""
    latest = max((item.expires_s for item in items), default=float("-inf"))
    body = msgspec.msgpack.encode((float("inf"), latest, [tuple(item) for item in items]))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(_DICTIONARY, body))


def unpack_items(raw: bytes) -> list[StoredItem]:
    """Return a reply's well-formed items, unchecked; raise `BadItem` if no dictionary or too long.

    The dictionary's own expiry is ignored: it is unsigned, and a reply that claims to last forever
    would end the reader's search. Entries of another form (other programs' subkeys) are skipped.
    """
    try:
        extension = _extension.decode(raw)
        if extension.code != _DICTIONARY:
            raise BadItem(f"extension {extension.code} is not a dictionary")
        entries = _dictionary.decode(extension.data)[2]
    except msgspec.MsgspecError as error:
        raise BadItem(f"not a dictionary: {error}") from None
    return [item for item in map(_unpack_entry, entries) if item is not None]


def _unpack_entry(raw: msgspec.Raw) -> StoredItem | None:
    try:
        return StoredItem(*_entry.decode(raw))
    except msgspec.MsgspecError:
        return None
