"""A meter of what simulated peers say to each other, and of the processor time that it costs them.

All peers of a simulated network share one thread, so that one clock times all of them. Of nested
pieces of work only the innermost is charged: the time of a signature is no part of the protocol's
own, and neither is that of the simulated network.

A process remembers good signatures, and in the product a process is one peer. While the meter is
on, each peer remembers its own: otherwise one peer would check a signature for all.
"""

import collections
import contextlib
import contextvars
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec

from farflock.swarm import identity
from farflock.swarm.frame import Frame, message_kind, unpack
from farflock.swarm.identity import SIGNATURE_BYTES, Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import ChunkMessage, Evaluated, Join, Message, Statements, Views
from farflock.swarm.peer import peer as peer_module
from farflock.swarm.peer.branching import Branching
from farflock.swarm.peer.calls.calls import Calls
from farflock.swarm.peer.codec_offers import CodecOffers
from farflock.swarm.peer.evaluations import Evaluations
from farflock.swarm.peer.load_reports import LoadReports
from farflock.swarm.peer.peer import Router
from farflock.swarm.peer.rounds.rounds import Rounds
from farflock.swarm.peer.tallies import Tallies
from farflock.swarm.peer.views.membership import Membership
from farflock.swarm.protocol.views import decode_certified
from farflock.swarm.sim.network import SimLinks

Work = Literal["protocol", "signing", "checking", "content", "links"]
Replacement = tuple[Any, str, object]  # (module or class, name, value)

CONTENT = "piece"  # the only message that is no control
CHUNKS = frozenset({CONTENT, "want", "miss"})  # messages whose handling is work on content
# Fields that are there only for their message to be believed, and messages that hold such in other
# ones.
EVIDENCE = ("proof", "proofs", "grounds", "refusals", "capability")
SIGNED_INSIDE = (Views, Statements, Evaluated, Join)
# The tags of all messages with evidence.
SIGNED = frozenset(
    each.__struct_config__.tag
    for each in get_args(Message)
    if each in SIGNED_INSIDE or set(EVIDENCE) & set(each.__struct_fields__)
)
# Whatever acts in a peer's ticks (`Peer._tick_loop`).
TICKING = (
    Membership,
    Calls,
    Branching,
    Rounds,
    Tallies,
    Evaluations,
    LoadReports,
    CodecOffers,
)

_acting: contextvars.ContextVar[PeerId] = contextvars.ContextVar("acting", default="")


@contextlib.contextmanager
def acting(peer: PeerId) -> Iterator[None]:
    """Charge what the block does, and the tasks that it begins, to a peer."""
    token = _acting.set(peer)
    try:
        yield
    finally:
        _acting.reset(token)


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Give modules and classes other values until the block ends."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def signature_bytes(message: Message) -> int:
    """Return the bytes of a message that are signatures, or are there only to be believed."""
    said = (getattr(message, name, None) for name in EVIDENCE)
    count = sum(len(msgspec.msgpack.encode(each)) for each in said if each)
    match message:
        case Views():
            proofs = (decode_certified(raw).proofs for raw in message.views)
            count += sum(len(msgspec.msgpack.encode(each)) for each in proofs)
            count += sum(map(len, message.links))
        case Statements() | Evaluated():
            count += sum(map(len, message.values))
        case Join():
            count += SIGNATURE_BYTES  # the record's
    return count


class Stopwatch:
    """Seconds by kind of work, of which each moment is charged to the innermost one."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock, self._since_s = clock, 0.0
        self._open: list[Work] = []
        self.spent_s: dict[Work, float] = collections.defaultdict(float)
        self.calls: collections.Counter[Work] = collections.Counter()

    def timed(
        self, work: Work | Callable[..., Work], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that does the same as `call`, charged to `work`, or to what `work`
        returns for its arguments."""

        @functools.wraps(call)
        def run(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever `call` takes
            self._charge()
            self._open.append(kind := work if isinstance(work, str) else work(*arguments))
            self.calls[kind] += 1
            try:
                return call(*arguments, **named)
            finally:
                self._charge()
                self._open.pop()

        return run

    def clear(self) -> None:
        """Begin to count anew."""
        self.spent_s.clear()
        self.calls.clear()

    def _charge(self) -> None:
        now_s = self._clock()
        if self._open:
            self.spent_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


class GoodSignatures:
    """Good signatures, each remembered by the peer that checked it; `checks` counts the others.

    It has what `identity.verify` asks of its own memory."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, dict[object, None]] = collections.defaultdict(dict)
        self.checks = 0

    def __contains__(self, name: object) -> bool:
        known = name in self._mine
        self.checks += not known
        return known

    def __setitem__(self, name: object, value: None) -> None:
        self._mine[name] = value

    def __len__(self) -> int:
        return len(self._mine)

    def clear(self) -> None:
        """Forget what the acting peer remembers."""
        self._mine.clear()

    @property
    def _mine(self) -> dict[object, None]:
        return self._by_peer[_acting.get()]


def signature_s(repeats: int = 100) -> tuple[float, float]:
    """Return the seconds in which a signature is made, and checked for the first time."""
    author, domain = Identity.generate(), b"measure"
    texts = [number.to_bytes(120, "big") for number in range(repeats)]
    begun_s = time.process_time()
    signed = [author.sign(domain, text) for text in texts]
    made_s = time.process_time()
    good = [identity.verify(author.peer, domain, *each) for each in zip(texts, signed, strict=True)]
    checked_s = time.process_time()
    assert all(good)
    return (made_s - begun_s) / repeats, (checked_s - made_s) / repeats


class Meter:
    """Counts of a simulated network's frames and, while it is `on`, of signatures and time."""

    def __init__(self) -> None:
        self.watch, self.remembered = Stopwatch(), GoodSignatures()
        self.content_bytes = 0
        # Bytes of all control and of signatures, by message, and of signatures by sender.
        self.control: collections.Counter[str] = collections.Counter()
        self.signatures: collections.Counter[str] = collections.Counter()
        self.signers: collections.Counter[PeerId] = collections.Counter()

    def clear(self) -> None:
        """Begin to count anew; peers still remember what they have checked."""
        self.watch.clear()
        self.remembered.checks = 0
        self.content_bytes = 0
        for counted in (self.control, self.signatures, self.signers):
            counted.clear()

    def count(self, sender: PeerId, frame: bytes, line_bytes: Callable[[bytes], int]) -> None:
        """Count a frame; one of content takes `line_bytes`."""
        kind = message_kind(frame).decode()
        if kind == CONTENT:
            self.content_bytes += line_bytes(frame)
            return
        self.control[kind] += len(frame)
        if kind in SIGNED:
            signed = signature_bytes(unpack(frame).message)
            self.signatures[kind] += signed
            self.signers[sender] += signed

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Time what peers do in the block, and let each remember its own signatures."""
        timed = self.watch.timed
        entries: list[Replacement] = [
            (Identity, "sign", timed("signing", Identity.sign)),
            (identity, "_good", self.remembered),
            (peer_module, "unpack", timed(_work_of_frame, unpack)),
            (Router, "deliver", timed(_work_of_delivery, Router.deliver)),
            (SimLinks, "send", timed("links", SimLinks.send)),
        ]
        entries += [(each, "tick", timed("protocol", each.tick)) for each in TICKING]
        checking = timed("checking", identity.verify)
        entries += [(each, "verify", checking) for each in _verifying_modules()]
        with replaced(entries):
            yield


def _work_of_frame(packed: bytes) -> Work:
    return "content" if message_kind(packed).decode() in CHUNKS else "protocol"


def _work_of_delivery(router: Router, sender: PeerId, frame: Frame) -> Work:
    return "content" if isinstance(frame.message, ChunkMessage) else "protocol"


def _verifying_modules() -> list[object]:
    """Return the modules of the swarm that call `verify` by a name of their own."""
    ours = (each for name, each in sys.modules.items() if name.startswith("farflock.swarm"))
    return [each for each in ours if getattr(each, "verify", None) is identity.verify]
