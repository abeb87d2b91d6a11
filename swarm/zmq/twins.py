"""One identity in two lives at once: a copied folder, a cloned machine, a restored backup.

Both have the same key, so nothing tells them apart but their lives (`Record.incarnation`). While
the elder is connected, it is asked to vouch on its own connections: to sign the younger's number,
which is drawn at random at its start, so that nobody can have signed it before. If it does, the
younger is told and cut off, before any of its frames is read, and checks the signature with its own
key: nobody else can send it away. If the elder says nothing for `ANSWER_S`, or its connections end,
it is gone, and the younger is a restart.
"""

from dataclasses import dataclass

from farflock.swarm.identity import Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.message import ASK_VOUCH, LIFE_BYTES, TWIN, VOUCH
from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.socket import ZmqSocket

ANSWER_S = 5.0
ASK_EVERY_S = 1.0  # one question may find no room
MAX_QUESTIONS = 64  # lives that are asked about; more are restarts
VOUCH_EVERY_S = ASK_EVERY_S / 2  # for one asker: a signature takes time

_DOMAIN = b"another life"


class OwnLife:
    """This process's life of an identity in a run, which vouches for itself."""

    def __init__(self, identity: Identity, run: str, life: int) -> None:
        self.run, self._identity, self._life = run, identity, life

    def vouch(self, other: bytes) -> bytes | None:
        """Sign the number of another life; None for this one's own, which would end it."""
        if int.from_bytes(other, "big") == self._life:
            return None
        return self._identity.sign(_DOMAIN, self.run.encode() + other)

    def is_another_there(self, signature: bytes) -> bool:
        """Return whether another life of this identity has signed this one's number."""
        mine = self._life.to_bytes(LIFE_BYTES, "big")
        return vouches(self._identity.peer, self.run, mine, signature)


def vouches(peer: PeerId, run: str, life: bytes, signature: bytes) -> bool:
    """Return whether a peer has signed the number of a life in this run."""
    return verify(peer, _DOMAIN, run.encode() + life, signature)


@dataclass(slots=True)
class Question:
    """A life that wants another's place: since when, when the elder was asked last, and the
    signature by which it has vouched, once there is one."""

    since_s: float
    asked_s: float = -1e9
    vouch: bytes = b""


class Twins:
    """Keeps the connections of younger lives waiting until the elder has answered, or is gone."""

    def __init__(self, table: PartnerTable, own: OwnLife) -> None:
        self._table, self._own = table, own
        self._questions: dict[tuple[PeerId, int], Question] = {}  # by peer and younger life
        self._waiting: dict[Route, None] = {}
        self._sent_away: set[Route] = set()

    def holds_back(self, partner: Partner, route: Route, now_s: float) -> bool:
        """Return whether a new connection must wait, since another life of its owner is here."""
        if not _elders(partner, route):
            return False
        key = (partner.peer, route.life)
        if key not in self._questions:
            if len(self._questions) >= MAX_QUESTIONS:
                return False
            self._questions[key] = Question(now_s)
        self._waiting[route] = None
        return True

    def tick(self, now_s: float) -> list[Route]:
        """Ask elder lives, and send away the younger ones of those that answer; return the
        connections that need not wait any longer."""
        free = []
        for route in list(self._waiting):
            partner = self._table.partners.get(route.owner)
            is_open = route.descriptor in route.port.connections
            if partner is None or not is_open:
                self._forget(route)
            elif self._is_free(partner, route, now_s):
                self._forget(route)
                free.append(route)
        asked = {(route.owner, route.life) for route in self._waiting}
        for key, question in list(self._questions.items()):
            # a dial gives up before the elder's time is over, and comes back
            if key not in asked and now_s - question.since_s > 2 * ANSWER_S:
                del self._questions[key]
        return free

    def _forget(self, route: Route) -> None:
        del self._waiting[route]
        self._sent_away.discard(route)

    def _is_free(self, partner: Partner, route: Route, now_s: float) -> bool:
        """Return whether a younger life's connection need not wait; ask the elder, or tell it."""
        question = self._questions[route.owner, route.life]
        elders = _elders(partner, route)
        if route in self._sent_away:  # by now it has been told
            route.kick("another life of its owner is here")
        elif question.vouch and elders:
            route.write(TWIN + question.vouch)
            self._sent_away.add(route)
        elif now_s - question.since_s >= ANSWER_S:
            for elder in elders:
                elder.kick("its owner has begun another life")
            return True
        elif elders and now_s - question.asked_s >= ASK_EVERY_S:
            question.asked_s = now_s
            for elder in elders:
                elder.write(ASK_VOUCH + route.life.to_bytes(LIFE_BYTES, "big"))
        return not elders and route not in self._sent_away

    def asked(self, partner: Partner, route: Route, life: bytes, now_s: float) -> None:
        """Vouch for this life to a partner that sees another one."""
        if now_s < partner.looks.vouch_s:
            return
        partner.looks.vouch_s = now_s + VOUCH_EVERY_S
        if (signature := self._own.vouch(life)) is not None:
            route.write(VOUCH + life + signature)

    def hear(self, route: Route, body: bytes) -> None:
        """Take an elder's vouch, if it was asked for one and this is its signature."""
        life, signature = body[:LIFE_BYTES], body[LIFE_BYTES:]
        number = int.from_bytes(life, "big")
        question = self._questions.get((route.owner, number))
        if question is None or number == route.life:
            self._table.counters["vouch that nobody has asked for"] += 1
        elif vouches(route.owner, self._own.run, life, signature):
            question.vouch = signature
        else:
            self._table.counters["vouch that is not signed"] += 1

    def told(self, signature: bytes) -> bool:
        """Return whether what a peer says of another life of this one is true."""
        if self._own.is_another_there(signature):
            return True
        self._table.counters["another life that nobody has signed"] += 1
        return False

    def waiting(self, port: ZmqSocket, address: bytes | None) -> Route | None:
        """Return a connection that is held back; what comes on it is not read."""
        held = (route for route in self._waiting if route.port is port)
        return next((route for route in held if route.address == address), None)


def _elders(partner: Partner, route: Route) -> list[Route]:
    """Return the control connections of other lives of a connection's owner."""
    return [each for each in partner.routes[CONTROL] if each.life != route.life]
