"""Calls from other peers: judge each, fetch its payloads, run its handler once, keep the answer.

Links lose answers and callers repeat calls, but no work is done twice. So a server keeps its calls
in a bounded table; a caller that finds it full asks again later. A restart empties it.

Only members are served (callers.py). Anybody else is told so, and nothing is kept of its call; but
`to_strangers` may answer a request at once, such as a newcomer's before it asks for admission.

A call may name other members that hold its payloads, and ask to leave those of the answer here
(left.py). It gains a liar little: a server fetches only from members, only what it has admitted by
size, and only as much at once as it has room for.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Answer, Call, CallVerdict, Heard, Keep, Payload, ViewQuery
from farflock.swarm.peer.calls.callers import Callers
from farflock.swarm.peer.calls.left import CallKey, LeftPayloads
from farflock.swarm.peer.calls.payloads import (
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
MAX_CALLS = 256  # being served, or answered but not heard
MAX_CALLS_EACH = 64  # the same, per caller, so that none takes all the room
WAITS_S = 1.5  # a caller that was told "full" repeats its call within this time, or has given up
ROOM_BYTES = 128 * 1024 * 1024  # payloads of open outgoing calls, and as much of incoming ones

log = logging.getLogger(__name__)


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


class CallServer:
    """Incoming calls, and this peer's calls to itself.

    `to_strangers` returns the answer to the request of a peer that is no member, or None."""

    def __init__(self, context: PeerContext, room_bytes: int) -> None:
        self.handler: Handler | None = None
        self.to_strangers: Callable[[PeerId, bytes], bytes | None] = lambda peer, request: None
        self._context, self._room_bytes = context, room_bytes
        self._served: dict[CallKey, _Served] = {}
        self.left = LeftPayloads(context)
        self._next_look_s = 0.0  # at the leases of what was left
        self.callers = Callers(context)
        self._waiting_s: dict[PeerId, float] = {}  # callers that found no room, and until when
        self.held_bytes = 0

    def __len__(self) -> int:
        """Return the number of calls served, or answered and not yet heard."""
        return len(self._served)

    def answer(self, caller: PeerId, incarnation: int, number: int) -> Answer | None:
        """Return the answer that is kept for a call, or None."""
        served = self._served.get((caller, incarnation, number))
        return None if served is None else served.answer

    def take_call(self, sender: PeerId, incarnation: int, call: Call) -> None:
        """Start serving a new call of a member, or repeat the answer to a known one."""
        key = (sender, incarnation, call.id)
        if key in self.left:
            self._context.send(sender, self.left.answer(key))
        elif (served := self._served.get(key)) is not None:
            self._send_answer(key, served)
        elif self.callers.admits(key[:2]):
            self._begin(key, call)
        else:
            self._turn_away(key, call)

    def _begin(self, key: CallKey, call: Call) -> None:
        size = sum(sizes_of(call.payloads))
        if self.callers.remember(key[:2]).is_over(call.id):
            self._say(key, "late")
        elif size > self._room_bytes:
            self._say(key, "failed")
        elif self._is_full(key[0], size):
            self._waiting_s[key[0]] = self._context.now() + WAITS_S
            self._say(key, "full")
        else:
            self._waiting_s.pop(key[0], None)
            self._served[key] = _Served(size)
            self.held_bytes += size
            self._context.spawn(self._serve(key, call))

    def _turn_away(self, key: CallKey, call: Call) -> None:
        """Answer a peer that is no member; it may be one of a view that is not known here yet."""
        body = None if call.payloads else self.to_strangers(key[0], call.request)
        if body is not None:
            self._context.send(key[0], Answer(key[1], key[2], "ok", body))
            return
        self._context.drop("call of a stranger")
        self._say(key, "stranger")
        if (chain := self._context.chain) is not None:
            self._context.send(key[0], ViewQuery(chain.newest.number + 1))

    def take_heard(self, sender: PeerId, incarnation: int, heard: Heard) -> None:
        """Drop an answer that the caller no longer needs; its call may still be on the way."""
        key = (sender, incarnation, heard.id)
        if key in self._served:
            self._end(key)
        elif key in self.left:
            self._forget(key)
        elif self.callers.admits(key[:2]):
            self.callers.remember(key[:2]).end(heard.id)

    def take_keep(self, sender: PeerId, incarnation: int, keep: Keep) -> None:
        """Renew the leases of payloads that were left here."""
        if self.callers.admits((sender, incarnation)):
            self.callers.remember((sender, incarnation))
            self.left.keep(sender, incarnation, keep.ids)
        else:
            self._context.drop("call of a stranger")

    def tick(self) -> None:
        """Give up callers that are gone, and answers that went unheard for too long."""
        now_s = self._context.now()
        for key, served in list(self._served.items()):
            if served.until_s <= now_s or self._context.life(key[0]) == "dead":
                self._end(key)
        self.callers.forget_silent()
        self._waiting_s = {
            caller: until_s for caller, until_s in self._waiting_s.items() if until_s > now_s
        }
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
        if (ended := self.callers.known(key[:2])) is not None:
            ended.end(key[2])

    def _is_full(self, sender: PeerId, size: int) -> bool:
        """True if there is no room for a new call, or if others wait and the sender has its share.

        Answers take up room too: they are never refused, as the work is done; new calls are."""
        mine = [served.held_bytes for key, served in self._served.items() if key[0] == sender]
        many = len(self._served) >= MAX_CALLS or len(mine) >= MAX_CALLS_EACH
        if many or self.held_bytes + size > self._room_bytes:
            return True
        others = self._waiting_s.keys() - {sender}
        if not (mine and others):
            return False
        callers = len({sender, *others, *(key[0] for key in self._served)})
        few = len(mine) < MAX_CALLS // callers
        return not (few and sum(mine) + size <= self._room_bytes // callers)


def _named(call: Call) -> list[tuple[int, tuple[Payload, tuple[PeerId, ...]]]]:
    """Return the place, the payload and the holders of each payload that others hold."""
    pairs = enumerate(zip(call.payloads, call.holders, strict=False))
    return [(place, pair) for place, pair in pairs if pair[1]]
