"""One identity in two lives at once: a copied folder, a cloned machine, a restored backup.

Both have the same key, so nothing tells them apart but their lives (`Record.incarnation`). While
the elder is connected, it is asked on its own connections, which only the owner of the key can
answer. If it answers, the younger is told and cut off, before any of its frames is read. If it does
not for `ANSWER_S`, or its connections end, it is gone, and the younger is a restart.
"""

from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.zmq.message import PING, TOKEN_BYTES, TWIN
from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route

ANSWER_S = 5.0
ASK_EVERY_S = 1.0  # one question may find no room
MAX_QUESTIONS = 64  # lives that are asked about; more are restarts


@dataclass(slots=True)
class Question:
    """A life that wants another's place: since when, the token from which on a pong is an answer,
    and when the elder was asked last."""

    since_s: float
    token: int
    asked_s: float


class Twins:
    """Keeps the connections of younger lives waiting until the elder has answered, or is gone."""

    def __init__(self, table: PartnerTable) -> None:
        self._table = table
        self._questions: dict[tuple[PeerId, int], Question] = {}  # by peer and younger life
        self._waiting: dict[Route, None] = {}
        self._sent_away: set[Route] = set()
        self.tellers: set[PeerId] = set()  # who says that this peer lives elsewhere

    def holds_back(self, partner: Partner, route: Route, now_s: float) -> bool:
        """Return whether a new connection must wait, since another life of its owner is here."""
        if not _elders(partner, route):
            return False
        key = (partner.peer, route.life)
        if key not in self._questions:
            if len(self._questions) >= MAX_QUESTIONS:
                return False
            self._questions[key] = Question(now_s, partner.pings + 1, -1e9)
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
        elif any(elder.answered >= question.token for elder in elders):
            route.write(TWIN)
            self._sent_away.add(route)
        elif now_s - question.since_s >= ANSWER_S:
            for elder in elders:
                elder.kick("its owner has begun another life")
            return True
        elif elders and now_s - question.asked_s >= ASK_EVERY_S:
            question.asked_s = now_s
            partner.pings, partner.ping_s = partner.pings + 1, now_s
            for elder in elders:
                elder.write(PING + partner.pings.to_bytes(TOKEN_BYTES, "big"))
        return not elders and route not in self._sent_away

    def told(self, by: PeerId) -> bool:
        """Note that a peer knows another life of this one; return whether that is to be believed:
        more peers say so than have let this one in."""
        self.tellers.add(by)
        others = (each for each in self._table.partners.values() if each.peer not in self.tellers)
        return len(self.tellers) > sum(each.best(CONTROL) is not None for each in others)


def _elders(partner: Partner, route: Route) -> list[Route]:
    """Return the control connections of other lives of a connection's owner."""
    return [each for each in partner.routes[CONTROL] if each.life != route.life]
