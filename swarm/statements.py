"""The founder's statements: an ordered, signed log of bans, of when new keys may come, and of which
line of views is the run's.

Each statement has a number and the hash of the one before it. Its author is the founder, or a key
that the manifest lists under `authorities`. Whoever signs from two machines may give one number
twice: then the stricter of the two holds, and both are kept and shown.

Wire: signature (64 bytes) + msgpack of `Statement`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from farflock.swarm.identity import SIGNATURE_BYTES, Identity, is_peer_id, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, MAX_STATEMENT_BYTES, Count, Digest

MAX_STATEMENTS = 1024  # numbers in the life of a run
MAX_RIVALS = 4  # statements of one number: two are a mistake, more are none
NONE = bytes(32)  # the hash before the first statement
_DOMAIN = b"statement"

AnchoredView = tuple[Count, Digest]  # number and hash of a view that the run's line has
StatementKind = Literal["ban", "close", "anchor", "promote", "open"]  # the strictest first
_STRICTNESS: tuple[StatementKind, ...] = ("ban", "close", "anchor", "promote", "open")


class Statement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An order to all members: `key` is banned, or has `votes` votes; or nobody new may come in
    (close), or may again (open); or the run's line of views is the one with `view` (anchor)."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    author: Annotated[str, msgspec.Meta(max_length=64)]
    number: Annotated[int, msgspec.Meta(ge=1, le=MAX_STATEMENTS)]
    previous: Digest
    kind: StatementKind
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""
    votes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)] = 0
    view: AnchoredView | None = None

    @property
    def hash(self) -> bytes:
        """SHA-256 of what is signed."""
        return hashlib.sha256(_encoder.encode(self)).digest()

    @property
    def said(self) -> str:
        """The order as a status says it."""
        what = {"promote": f"promote {self.key} to {self.votes}", "ban": f"ban {self.key}"}
        if self.view is not None:
            what["anchor"] = f"anchor view {self.view[0]} ({self.view[1].hex()[:8]})"
        return f"{self.number}: {what.get(self.kind, self.kind)}"


class BadStatement(ValueError):
    """A statement that nobody who may make statements signed so."""


_decoder = msgspec.msgpack.Decoder(Statement)
_encoder = msgspec.msgpack.Encoder()


def seal(author: Identity, statement: Statement) -> bytes:
    """Sign a statement; raise `BadStatement` if others would refuse it."""
    body = _encoder.encode(statement)
    blob = author.sign(_DOMAIN, body) + body
    unseal(blob, statement.run)
    return blob


def unseal(blob: bytes, run: str) -> Statement:
    """Verify and decode a statement on this run; raise `BadStatement` with the reason."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_STATEMENT_BYTES:
        raise BadStatement(f"a statement of {len(blob)} bytes")
    signature, body = blob[:SIGNATURE_BYTES], blob[SIGNATURE_BYTES:]
    try:
        statement = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadStatement(f"not a statement: {ascii(str(error))[1:-1]}") from None
    if _encoder.encode(statement) != body:
        raise BadStatement("a statement in another than its canonical form")
    if (statement.kind in ("ban", "promote")) != is_peer_id(statement.key):
        raise BadStatement("a statement on no key, or with a key too many")
    if (statement.kind == "anchor") != (statement.view is not None):
        raise BadStatement("an anchor of no view, or a view that is not anchored")
    if statement.run != run:
        raise BadStatement("a statement on another run")
    if not verify(statement.author, _DOMAIN, body, signature):
        raise BadStatement("not signed by its author")
    return statement


@dataclass(frozen=True, slots=True)
class Orders:
    """The sum of all statements: the number and hash of the newest, the banned keys, whether new
    keys may come in, the votes that were given, and the view that was anchored last."""

    newest: tuple[int, bytes] = (0, NONE)
    banned: frozenset[PeerId] = frozenset()
    closed: bool = False
    promoted: tuple[tuple[PeerId, int], ...] = ()
    anchor: AnchoredView | None = None


NO_ORDERS = Orders()


@dataclass(slots=True)
class StatementLog:
    """All statements on one run that are known here."""

    run: str
    authors: tuple[PeerId, ...]
    orders: Orders = NO_ORDERS
    _by_number: dict[int, dict[bytes, tuple[Statement, bytes]]] = field(default_factory=dict)
    _blobs: set[bytes] = field(default_factory=set)  # of these; many peers send the same ones

    def add(self, blob: bytes) -> bool:
        """Take in a statement; return False if it is known, or comes before the one that it
        follows. Raise `BadStatement` if it is nobody's."""
        if blob in self._blobs:
            return False
        statement = unseal(blob, self.run)
        if statement.author not in self.authors:
            raise BadStatement("its author may make no statements")
        before = self._by_number.get(statement.number - 1, {})
        follows = statement.previous in before or (
            statement.number == 1 and statement.previous == NONE
        )
        rivals = self._by_number.get(statement.number, {})
        if not follows or statement.hash in rivals or len(rivals) >= MAX_RIVALS:
            return False
        self._by_number.setdefault(statement.number, {})[statement.hash] = statement, blob
        self._blobs.add(blob)
        self.orders = self._summed_up()
        return True

    def since(self, number: int) -> Iterator[bytes]:
        """Yield the statements from a number on, in order."""
        for place in range(number, len(self._by_number) + 1):
            yield from (blob for _, blob in self._by_number[place].values())

    def knows(self, newest: tuple[int, bytes]) -> bool:
        """True if a statement of this number and hash is known here, or if that is none."""
        number, name = newest
        return newest == NO_ORDERS.newest or name in self._by_number.get(number, {})

    @property
    def said(self) -> tuple[str, ...]:
        """All statements in words, also those that a stricter one of their number replaces."""
        words = []
        for rivals in self._by_number.values():
            holds = _strictest(rivals)
            for statement, _ in rivals.values():
                note = "" if statement == holds else " (replaced: another one has its number)"
                words.append(statement.said + note)
        return tuple(words)

    def next(
        self,
        author: PeerId,
        kind: StatementKind,
        key: str = "",
        votes: int = 0,
        view: AnchoredView | None = None,
    ) -> Statement:
        """Return the statement that would come next."""
        number, name = self.orders.newest
        return Statement(self.run, author, number + 1, name, kind, key, votes, view)

    def _summed_up(self) -> Orders:
        holding = [_strictest(rivals) for _, rivals in sorted(self._by_number.items())]
        doors = [each.kind for each in holding if each.kind in ("close", "open")]
        anchors = [each.view for each in holding if each.kind == "anchor"]
        promoted = {each.key: each.votes for each in holding if each.kind == "promote"}
        return Orders(
            (holding[-1].number, holding[-1].hash),
            frozenset(each.key for each in holding if each.kind == "ban"),
            doors[-1:] == ["close"],
            tuple(promoted.items()),
            anchors[-1] if anchors else None,
        )


def _strictest(rivals: dict[bytes, tuple[Statement, bytes]]) -> Statement:
    """Return the one of statements of one number that holds; the same one everywhere."""
    return min(
        (statement for statement, _ in rivals.values()),
        key=lambda each: (_STRICTNESS.index(each.kind), each.votes, each.hash),
    )
