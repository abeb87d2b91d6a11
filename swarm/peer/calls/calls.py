"""Calls: one peer asks another for work, with payloads both ways, such as a pass through a stage.

A request is repeated until its answer arrives, so links may lose anything. Payloads are chunks,
fetched by the receiver when it has room: a refusal costs none, and no peer can fill another's
memory. Small ones come with the first copy of the call or answer (payloads.py), which then takes
one round trip instead of three; a refusal drops them. The payloads of an answer may stay with the
server (`Left`), and go from there to the server of a later call, without crossing this peer's line.

    caller                              server (call_server.py)
    Call, repeated ------------------>  admit: a refusal is an answer
                                        fetch the payloads, serve
    fetch its payloads  <-------------  Answer, repeated for each repeated Call
    Heard --------------------------->  forget the answer

Ids are unique in one life of the caller. A restarted server knows none of its calls and is asked
again.
"""

import asyncio
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from farflock.swarm.byte_budget import ByteBudget
from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_LEFT_IDS, Answer, Call, CallVerdict, Heard, Keep
from farflock.swarm.paths.round_robin import CallFailure
from farflock.swarm.peer.calls.call_server import (
    FETCH_S,
    LEASE_S,
    ROOM_BYTES,
    CallReply,
    CallServer,
    Handler,
    Undelivered,
)
from farflock.swarm.peer.calls.payloads import (
    Delivered,
    Given,
    Left,
    fetch,
    fetch_left,
    holders_of,
    inline_of,
    inline_s,
    put,
    require_sendable,
    sizes_of,
    take_inline,
)

RESEND_S = 0.5  # a lost message costs half a second; a served call is not served again
KEEP_S = LEASE_S / 3  # while its answer's payloads are fetched, a repeated call renews their lease


class CallFailed(Exception):
    """A call without a result.

    `reason` is "dial" (the peer is gone), "rpc" (it failed or refused) or "deadline"."""

    def __init__(self, reason: CallFailure, message: str) -> None:
        super().__init__(message)
        self.reason: CallFailure = reason


class NotAdmitted(CallFailed):
    """A call of a peer that is no member, or not yet."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__("rpc", f"{peer} serves members, and this peer is in no view")


class NotFetched(CallFailed):
    """A call whose server could not fetch the payloads at `places` (if it says which) from their
    holders."""

    def __init__(self, peer: PeerId, places: Collection[int]) -> None:
        super().__init__("rpc", f"{peer} cannot fetch payloads {list(places)} from their holders")
        self.places = places


@dataclass(slots=True)
class _Asked:
    """An outgoing call; its answer is None if the peer is gone."""

    peer: PeerId
    call: Call
    answer: asyncio.Future[Answer | None]
    resend_s: float = 0.0


class Calls:
    """All calls of one peer, incoming and outgoing.

    `room_bytes` bounds the payloads of outgoing calls, and again those of incoming ones."""

    def __init__(self, context: PeerContext, *, room_bytes: int = ROOM_BYTES) -> None:
        self._context, self._room_bytes = context, room_bytes
        self._serving = CallServer(context, room_bytes)
        self._sending = ByteBudget(room_bytes)
        self._ids = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._delivered = Delivered()
        self._left: dict[tuple[PeerId, int], None] = {}  # calls whose payloads stay there
        self._next_keep_s = 0.0

    @property
    def handler(self) -> Handler | None:
        """The handler of incoming calls and of calls to oneself; without one, they fail."""
        return self._serving.handler

    @handler.setter
    def handler(self, handler: Handler | None) -> None:
        self._serving.handler = handler

    @property
    def serving(self) -> CallServer:
        """The calls of other peers to this one."""
        return self._serving

    @property
    def asking(self) -> int:
        """The number of calls to other peers in progress."""
        return len(self._asked)

    @property
    def left(self) -> int:
        """The number of calls whose payloads stay at their servers until they are dropped."""
        return len(self._left)

    @property
    def sending(self) -> bool:
        """True while payloads of calls to other peers take room."""
        return not self._sending.idle

    async def ask(
        self,
        peer: PeerId,
        request: bytes,
        payloads: Sequence[Given] = (),
        *,
        timeout_s: float,
        max_reply_bytes: int,
        leave: bool = False,
    ) -> CallReply:
        """Have a peer's handler do some work, at most once per life of the peer; return its reply.

        A full peer is asked again. If `leave`, large payloads of another peer's reply may stay
        there until `drop`. Raise `CallFailed` if there is no result in time, or one of more than
        `max_reply_bytes`, and `NotFetched` if only what was left elsewhere is missing; `ValueError`
        if the call is too large. If cancelled, tell the peer to drop it."""
        require_sendable(request, payloads)
        size = sum(len(payload) for payload in payloads if isinstance(payload, bytes))
        if size > self._room_bytes:
            raise ValueError(
                f"a call with payloads of {size} bytes; this peer sends at most "
                f"{self._room_bytes}, so send a smaller batch"
            )
        try:
            async with asyncio.timeout(timeout_s):
                if peer == self._context.me:
                    return await self._ask_myself(request, tuple(payloads), max_reply_bytes)
                taken = await self._sending.take(size, size) if size else 0
                try:
                    call = Call(next(self._ids), request, leave=leave)
                    return await self._ask(peer, call, payloads, timeout_s, max_reply_bytes)
                finally:
                    self._sending.give(taken)
        except TimeoutError:
            raise CallFailed(
                "deadline", f"{peer} did not answer and deliver within {timeout_s:.1f} s"
            ) from None

    @property
    def is_busy(self) -> bool:
        """True if a call of this peer, or to it, is open or was lately."""
        return bool(self._asked or self._serving.callers.lives)

    async def fetch(self, left: Left, timeout_s: float) -> bytes | None:
        """Fetch a payload that was left with its maker; None if no holder delivers it in time."""
        pin = ("left", next(self._ids))
        try:
            return await fetch_left(self._context, left, pin, timeout_s)
        finally:
            self._context.store.release(pin)

    def drop(self, left: Left) -> None:
        """Have a payload's maker forget it, and all else that its call has left there."""
        if left.call in self._left:
            del self._left[left.call]
            self._context.send(left.holders[0], Heard(left.number))

    def receive(
        self, sender: PeerId, incarnation: int, message: Call | Answer | Heard | Keep
    ) -> None:
        """Handle a message of a call."""
        match message:
            case Call():
                self._serving.take_call(sender, incarnation, message)
            case Heard():
                self._serving.take_heard(sender, incarnation, message)
            case Keep():
                self._serving.take_keep(sender, incarnation, message)
            case Answer():
                self._take_answer(sender, message)

    def tick(self) -> None:
        """Repeat open calls, give up those to dead peers, and tick the server side."""
        self._serving.tick()
        now_s = self._context.now()
        for asked in self._asked.values():
            if self._context.life(asked.peer) == "dead":
                if not asked.answer.done():
                    asked.answer.set_result(None)
            elif asked.resend_s <= now_s:
                self._send(asked)
        if self._left and self._next_keep_s <= now_s:
            self._next_keep_s = now_s + KEEP_S
            self._renew()

    def _renew(self) -> None:
        """Renew the leases of what was left, server by server."""
        for peer in {peer: None for peer, _ in self._left}:
            ids = tuple(number for server, number in self._left if server == peer)
            for first in range(0, len(ids), MAX_LEFT_IDS):
                self._context.send(peer, Keep(ids[first : first + MAX_LEFT_IDS]))

    async def _ask(
        self,
        peer: PeerId,
        call: Call,
        payloads: Sequence[Given],
        timeout_s: float,
        max_reply_bytes: int,
    ) -> CallReply:
        if self._context.life(peer) == "dead":
            raise CallFailed("dial", f"{peer} is gone")
        number, pin = call.id, ("call", call.id)
        call = msgspec.structs.replace(
            call, payloads=put(self._context, payloads, pin), holders=holders_of(payloads)
        )
        asked = self._asked[number] = _Asked(peer, call, asyncio.get_running_loop().create_future())
        try:
            known = partial(self._delivered.had, peer)
            await self._send_first(asked, inline_of(payloads, call.payloads, known), timeout_s)
            answer = await asked.answer
            if answer is None:
                raise CallFailed("dial", f"{peer} is gone and has not answered")
            if answer.verdict == "late" and call.holders:
                raise NotFetched(peer, b"")  # an older build asks only the caller for payloads
            _require_good(peer, answer, sum(sizes_of(answer.payloads)), max_reply_bytes)
            self._delivered.add(peer, call.payloads)
            if call.leave and answer.left:
                self._left[peer, number] = None
                left = tuple(Left(chunks, (peer,), number) for chunks in answer.payloads)
                return CallReply(answer.body, (), left)
            take_inline(self._context, answer.payloads, answer.inline, pin)
            fetched = await fetch(self._context, (peer,), answer.payloads, pin, timeout_s)
            if fetched is None:
                gone = self._context.life(peer) == "dead"
                raise CallFailed(
                    "dial" if gone else "rpc", f"{peer} does not deliver its answer's payloads"
                )
            return CallReply(answer.body, fetched)
        finally:
            del self._asked[number]
            self._context.store.release(pin)
            # Even after a failure: the server then need not keep the answer for its whole lease.
            if (peer, number) not in self._left:
                self._context.send(peer, Heard(number))

    async def _ask_myself(
        self, request: bytes, payloads: tuple[Given, ...], max_reply_bytes: int
    ) -> CallReply:
        """Serve our own call in a task, so that a cancelled caller does not cancel the handler."""
        done: asyncio.Future[tuple[CallVerdict, CallReply]] = (
            asyncio.get_running_loop().create_future()
        )

        async def here() -> tuple[bytes, ...]:
            come = [await self._whole(payload) for payload in payloads]
            if lacking := [place for place, payload in enumerate(come) if payload is None]:
                raise Undelivered("missing", lacking)
            return tuple(payload for payload in come if payload is not None)

        async def work() -> None:
            outcome = await self._serving.outcome(
                self._context.me, request, tuple(map(len, payloads)), here
            )
            if not done.done():
                done.set_result(outcome)

        self._context.spawn(work())
        verdict, reply = await done
        answer = Answer(self._context.incarnation, 0, verdict, reply.body)
        _require_good(self._context.me, answer, sum(map(len, reply.payloads)), max_reply_bytes)
        return reply

    async def _whole(self, payload: Given) -> bytes | None:
        return payload if isinstance(payload, bytes) else await self.fetch(payload, FETCH_S)

    async def _send_first(self, asked: _Asked, inline: tuple[bytes, ...], timeout_s: float) -> None:
        """Send a call with its small payloads; repeats go without them, and not before these had
        time to arrive."""
        if not inline:
            self._send(asked)
            return
        asked.resend_s = math.inf
        whole = msgspec.structs.replace(asked.call, inline=inline)
        sent = await self._context.send_bulk(asked.peer, whole, timeout_s)
        asked.resend_s = self._context.now() + (RESEND_S + inline_s(inline) if sent else 0.0)

    def _send(self, asked: _Asked) -> None:
        asked.resend_s = self._context.now() + (KEEP_S if asked.answer.done() else RESEND_S)
        self._context.send(asked.peer, asked.call)

    def _take_answer(self, sender: PeerId, answer: Answer) -> None:
        asked = self._asked.get(answer.id)
        if asked is None or asked.peer != sender or answer.incarnation != self._context.incarnation:
            self._context.drop("answer to no call")
        elif answer.verdict == "full":
            self._context.counters["calls to a full peer"] += 1  # `tick` asks again
        elif answer.verdict == "stranger" and self._context.is_member:
            # It does not know our newest view yet, and asks us for it; `tick` asks again.
            self._context.counters["calls to a peer with old views"] += 1
        elif not asked.answer.done():
            asked.answer.set_result(answer)


def _require_good(peer: PeerId, answer: Answer, size: int, max_reply_bytes: int) -> None:
    """Raise `CallFailed` unless the answer is good and its payloads may be fetched."""
    if answer.verdict == "stranger":
        raise NotAdmitted(peer)
    if answer.verdict == "missing":
        raise NotFetched(peer, answer.body)
    if answer.verdict == "late":
        raise CallFailed(
            "deadline", f"{peer} did not get the payloads in time, or has given up this call"
        )
    if answer.verdict != "ok":
        raise CallFailed("rpc", f"{peer} failed to do what it was asked")
    if size > max_reply_bytes:
        raise CallFailed(
            "rpc", f"{peer} answers with {size} bytes; at most {max_reply_bytes} were agreed"
        )
