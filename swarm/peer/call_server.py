"""Calls from other peers: judge each, fetch its payloads, run its handler once, keep the answer.

Links lose answers and callers repeat calls, but no work is done twice. So a server keeps its calls
in a bounded table; a caller that finds it full asks again later. A restart empties it.

A call may name other members that hold its payloads, and ask to leave those of the answer here
(left.py). It gains a liar little: a server fetches only from members, only what it has admitted by
size, and only as much at once as it has room for.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Answer, Call, CallVerdict, Heard, Keep, Payload
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.left import CallKey, LeftPayloads
from farflock.swarm.peer.payloads import (
    Left,
    fetch,
    fetch_left,
    inline_of,
    inline_s,
    put,
    require_sendable,
    sizes_of,
    take_inline,
)

LEASE_S = 30.0  # an answer is kept this long after it was last sent: many repetitions of a call
FETCH_S = 60.0  # for fetching a call's payloads, so that a dead caller frees its room
LOOK_AT_LEFT_S = 1.0  # between two looks at the leases of what was left here
SERVE_S = 300.0  # for the handler; generous, so that only a stuck one is ended
FORGET_S = 600.0  # after a silence this long, no late copy of a call is still on its way
MAX_CALLS = 256  # being served, or answered but not heard
MAX_CALLS_EACH = 64  # the same, per caller, so that none takes all the room
MAX_CALLERS = 256  # remembered lives of callers
MAX_LIVES = 4  # the same, per peer, so that one that restarts often does not crowd out others
MAX_OVER = 512  # remembered call ids of one life; older ones count as over
ROOM_BYTES = 128 * 1024 * 1024  # payloads of open outgoing calls, and as much of incoming ones

log = logging.getLogger(__name__)

_Caller = tuple[PeerId, int]  # (caller, incarnation)


@dataclass(frozen=True, slots=True)
class CallReply:
    """The reply to a call: a body of up to 8 KiB, and up to 4 payloads of up to 64 MiB each.
    Instead of `payloads`, the caller may get what they `left` at the server."""

    body: bytes = b""
    payloads: tuple[bytes, ...] = ()
    left: tuple[Left, ...] = ()


class Undelivered(Exception):
    """The payloads of a call could not be had: from the caller, or ("missing") those at `places`
    from the holders that it names."""

    def __init__(self, verdict: CallVerdict, places: Collection[int] = ()) -> None:
        super().__init__(verdict)
        self.verdict, self.places = verdict, bytes(places)


class Handler(Protocol):
    """Serves calls; an exception is logged and fails only its call."""

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Return None to fetch payloads of `sizes` bytes and serve, or a refusal as answer body."""
        ...

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Do the work, once per call, in `SERVE_S`; the reply is dropped if the caller is gone."""
        ...


@dataclass(slots=True)
class _Served:
    """One call, until its caller has heard the answer or can no longer want it."""

    held_bytes: int
    answer: Answer | None = None
    until_s: float = math.inf
    quiet_s: float = 0.0  # until then, a copy of the answer with its payloads is on its way
    fetching: asyncio.Task[Any] | None = None  # cancelled when unwanted
    unwanted: bool = False


@dataclass(slots=True)
class _Seen:
    """The finished calls of one life of a caller, so that a late copy is not served again."""

    heard_s: float = 0.0
    floor: int = 0  # all ids below are over, or too late
    over: dict[int, None] = field(default_factory=dict)  # oldest first

    def end(self, number: int) -> None:
        if self.is_over(number):
            return
        self.over[number] = None
        if len(self.over) > MAX_OVER:
            oldest = next(iter(self.over))
            del self.over[oldest]
            self.floor = max(self.floor, oldest + 1)

    def is_over(self, number: int) -> bool:
        return number < self.floor or number in self.over


class CallServer:
    """Incoming calls, and this peer's calls to itself."""

    def __init__(self, context: PeerContext, room_bytes: int) -> None:
        self.handler: Handler | None = None
        self._context, self._room_bytes = context, room_bytes
        self._served: dict[CallKey, _Served] = {}
        self.left = LeftPayloads(context)
        self._next_look_s = 0.0  # at the leases of what was left
        self._seen: dict[_Caller, _Seen] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        """Return the number of calls served, or answered and not yet heard."""
        return len(self._served)

    def answer(self, caller: PeerId, incarnation: int, number: int) -> Answer | None:
        """Return the answer that is kept for a call, or None."""
        served = self._served.get((caller, incarnation, number))
        return None if served is None else served.answer

    @property
    def callers(self) -> tuple[tuple[PeerId, int], ...]:
        """The lives of callers that are remembered: (peer, incarnation)."""
        return tuple(self._seen)

    def remembered(self, caller: PeerId, incarnation: int) -> int:
        """Return how many ended calls of a caller's life are remembered by number."""
        return len(self._seen[caller, incarnation].over)

    def take_call(self, sender: PeerId, incarnation: int, call: Call) -> None:
        """Start serving a new call, or repeat the answer to a known one."""
        key, seen = (sender, incarnation, call.id), self._remember((sender, incarnation))
        served, size = self._served.get(key), sum(sizes_of(call.payloads))
        if key in self.left:
            self._context.send(sender, self.left.answer(key))
        elif served is not None:
            self._send_answer(key, served)
        elif seen is not None and seen.is_over(call.id):
            self._say(key, "late")
        elif size > self._room_bytes:
            self._say(key, "failed")
        elif seen is None or self._is_full(sender, size):
            self._say(key, "full")
        else:
            self._served[key] = _Served(size)
            self.held_bytes += size
            self._context.spawn(self._serve(key, call))

    def take_heard(self, sender: PeerId, incarnation: int, heard: Heard) -> None:
        """Drop an answer that the caller no longer needs; its call may still be on the way."""
        key, seen = (sender, incarnation, heard.id), self._remember((sender, incarnation))
        if key in self._served:
            self._end(key)
        elif key in self.left:
            self._forget(key)
        elif seen is not None:
            seen.end(heard.id)

    def take_keep(self, sender: PeerId, incarnation: int, keep: Keep) -> None:
        """Renew the leases of payloads that were left here."""
        self._remember((sender, incarnation))
        self.left.keep(sender, incarnation, keep.ids)

    def tick(self) -> None:
        """Give up callers that are gone, and answers that went unheard for too long."""
        now_s = self._context.now()
        for key, served in list(self._served.items()):
            if served.until_s <= now_s or self._context.life(key[0]) == "dead":
                self._end(key)
        for caller, seen in list(self._seen.items()):
            if seen.heard_s + FORGET_S <= now_s:
                del self._seen[caller]
        if self._next_look_s <= now_s:
            self._next_look_s = now_s + LOOK_AT_LEFT_S
            for key in self.left.over():
                self._forget(key)

    async def outcome(
        self,
        caller: PeerId,
        request: bytes,
        sizes: tuple[int, ...],
        payloads: Callable[[], Awaitable[tuple[bytes, ...]]],
    ) -> tuple[CallVerdict, CallReply]:
        """Run the handler on what `payloads` fetches, unless that raises `Undelivered`. Exceptions
        of the handler fail only this call."""
        handler = self.handler
        if handler is None:
            return "failed", CallReply()
        try:
            refusal = handler.admit(caller, request, sizes)
            require_sendable(refusal or b"")
        except Exception:
            log.exception("the handler failed to admit or refuse a call from %s", caller)
            return "failed", CallReply()
        if refusal is not None:
            return "ok", CallReply(refusal)
        try:
            whole = await payloads()
        except Undelivered as error:
            return error.verdict, CallReply(error.places)
        try:
            async with asyncio.timeout(SERVE_S):
                reply = await handler.serve(caller, request, whole)
            require_sendable(reply.body, reply.payloads)
        except Exception:
            log.exception("the handler failed to serve a call from %s", caller)
            return "failed", CallReply()
        return "ok", reply

    async def _serve(self, key: CallKey, call: Call) -> None:
        """Serve one call until it is answered, or ended because its caller no longer wants it."""
        served = self._served[key]
        try:
            if served.unwanted:
                return
            sizes = sizes_of(call.payloads)
            verdict, reply = await self.outcome(
                key[0], call.request, sizes, lambda: self._fetch(key, served, call)
            )
            if not served.unwanted:
                self._answer(key, call, verdict, reply)
        finally:
            if served.answer is None:
                self._drop(key)

    async def _fetch(self, key: CallKey, served: _Served, call: Call) -> tuple[bytes, ...]:
        served.fetching = asyncio.current_task()
        take_inline(self._context, call.payloads, call.inline, key)
        try:
            elsewhere = await self._fetch_elsewhere(key, call)
            rest = [
                payload for place, payload in enumerate(call.payloads) if place not in elsewhere
            ]
            mine = await fetch(self._context, (key[0],), rest, key, FETCH_S)
        finally:
            served.fetching = None
            if not call.leave:
                self._context.store.release(key)
        if mine is None:
            raise Undelivered("late")
        come = iter(mine)
        return tuple(
            elsewhere[place] if place in elsewhere else next(come)
            for place in range(len(call.payloads))
        )

    async def _fetch_elsewhere(self, key: CallKey, call: Call) -> dict[int, bytes]:
        """Fetch the payloads that other members hold, by place; only for a member."""
        placed = {place: Left(*named, key[2]) for place, named in _named(call)}
        if not placed:
            return {}
        chain = self._context.chain
        if chain is None or not chain.newest.lists(key[0]):
            raise Undelivered("missing", placed)
        come = await asyncio.gather(
            *(fetch_left(self._context, left, key, FETCH_S) for left in placed.values())
        )
        found = dict(zip(placed, come, strict=True))
        if lacking := [place for place, payload in found.items() if payload is None]:
            raise Undelivered("missing", lacking)
        return {place: payload for place, payload in found.items() if payload is not None}

    def _answer(self, key: CallKey, call: Call, verdict: CallVerdict, reply: CallReply) -> None:
        """Answer, and keep the answer until it is heard."""
        served, size = self._served[key], sum(map(len, reply.payloads))
        self.held_bytes += size - served.held_bytes
        served.held_bytes = size
        announced = put(self._context, reply.payloads, key)
        served.answer = Answer(key[1], key[2], verdict, reply.body, announced)
        stays = call.leave and self.left.has_room(key[0], size)
        self._keep_only(key, (*announced, *(payload for _, (payload, _) in _named(call) if stays)))
        if stays:
            answer = msgspec.structs.replace(served.answer, left=True)
            self.held_bytes -= self._served.pop(key).held_bytes
            self.left.add(key, answer)
            self._context.send(key[0], answer)
        elif inline := inline_of(reply.payloads, announced):
            whole = msgspec.structs.replace(served.answer, inline=inline)
            self._context.spawn(self._send_whole(key, served, whole))
        else:
            self._send_answer(key, served)

    def _keep_only(self, key: CallKey, payloads: Iterable[Payload]) -> None:
        digests = {digest for payload in payloads for digest, _ in payload}
        self._context.store.keep_only(digests, key)

    async def _send_whole(self, key: CallKey, served: _Served, whole: Answer) -> None:
        """Send an answer with its small payloads; repeats go without them, and not before these
        had time to arrive."""
        served.until_s, served.quiet_s = self._context.now() + LEASE_S, math.inf
        sent = await self._context.send_bulk(key[0], whole, LEASE_S)
        served.quiet_s = self._context.now() + (inline_s(whole.inline) if sent else 0.0)
        served.until_s = self._context.now() + LEASE_S

    def _send_answer(self, key: CallKey, served: _Served) -> None:
        if served.answer is not None and self._context.now() >= served.quiet_s:
            served.until_s = self._context.now() + LEASE_S
            self._context.send(key[0], served.answer)

    def _say(self, key: CallKey, verdict: CallVerdict) -> None:
        self._context.send(key[0], Answer(key[1], key[2], verdict))

    def _end(self, key: CallKey) -> None:
        """Drop an unwanted call, but not a running handler: it may hold more than this call."""
        served = self._served[key]
        if served.answer is not None:
            self._drop(key)
        else:
            served.unwanted = True
            if served.fetching is not None:
                served.fetching.cancel()

    def _drop(self, key: CallKey) -> None:
        self.held_bytes -= self._served.pop(key).held_bytes
        self._context.store.release(key)
        self._note_end(key)

    def _forget(self, key: CallKey) -> None:
        """Drop what a call has left here."""
        self.left.drop(key)
        self._note_end(key)

    def _note_end(self, key: CallKey) -> None:
        if (seen := self._seen.get(key[:2])) is not None:
            seen.end(key[2])

    def _remember(self, caller: _Caller) -> _Seen | None:
        """Return the record of one life of a caller; None if there are too many.

        Lives have no order: a late message from an old life must not end calls of the next."""
        if caller not in self._seen:
            lives = [other for other in self._seen if other[0] == caller[0]]
            if len(lives) >= MAX_LIVES:
                del self._seen[min(lives, key=lambda life: self._seen[life].heard_s)]
            if len(self._seen) >= MAX_CALLERS:
                return None
            self._seen[caller] = _Seen()
        self._seen[caller].heard_s = self._context.now()
        return self._seen[caller]

    def _is_full(self, sender: PeerId, size: int) -> bool:
        """True if there is no room for a new call.

        Answers take up room too: they are never refused, as the work is done; new calls are."""
        of_sender = sum(key[0] == sender for key in self._served)
        many = len(self._served) >= MAX_CALLS or of_sender >= MAX_CALLS_EACH
        return many or self.held_bytes + size > self._room_bytes


def _named(call: Call) -> list[tuple[int, tuple[Payload, tuple[PeerId, ...]]]]:
    """Return the place, the payload and the holders of each payload that others hold."""
    pairs = enumerate(zip(call.payloads, call.holders, strict=False))
    return [(place, pair) for place, pair in pairs if pair[1]]
