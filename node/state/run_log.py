"""A node's records while it trains: each step's numbers, events, and a receipt per applied round.

A receipt has the round's participants and outcome, who decided it, and the links' bytes since the
last receipt.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict

from farflock.node.state.history import History, HistoryUnusable
from farflock.swarm.accusations import Accusation
from farflock.swarm.peer.rounds.round_log import Verdict
from farflock.swarm.protocol.views import View

log = logging.getLogger(__name__)


class RunRecorder:
    """Records a loop's reports; `total_bytes` returns the bytes that the links have sent and
    received, and `verdict` who decided a round of a stream, as far as that is known."""

    def __init__(
        self,
        history: History,
        total_bytes: Callable[[], tuple[int, int]],
        verdict: Callable[[str, int], Verdict | None] = lambda stream, number: None,
    ) -> None:
        self._history, self._total_bytes, self._verdict = history, total_bytes, verdict
        self._counted = total_bytes()
        self.rounds: dict[str, int] = {}  # counts of applied rounds since the start, by status
        self.last_round: int | None = None
        self._fails = False

    def report(self, kind: str, fields: dict[str, object]) -> None:
        """Record one event. A full disk must not end a node that could continue to train."""
        try:
            self._note(kind, fields)
            self._fails = False
        except HistoryUnusable as error:
            if not self._fails:
                log.warning("could not write the run's history, training goes on: %s", error)
            self._fails = True

    def accused(self, accusation: Accusation) -> None:
        """Record and say a peer's first false statement of a kind."""
        log.warning(
            "peer %s lies: %s; it is refused (farflock status --suspects)",
            accusation.peer,
            accusation.what,
        )
        self.report("accused", {"peer": accusation.peer, "what": accusation.what})

    def refounded(self, view: View, loses_state: bool) -> None:
        """Record that the voters that are there have re-founded the run's newest view."""
        self.report(
            "refounded",
            {
                "view": view.number,
                "round": view.first_round,
                "members": list(view.peers),
                "state_lost": loses_state,
            },
        )

    def _note(self, kind: str, fields: dict[str, object]) -> None:
        match kind:
            case "step":
                self._history.metrics(int(str(fields["step"])), loss=float(str(fields["loss"])))
            case "round":
                self._round(fields)
            case "evaluation":
                if fields["loss"] is not None and not fields["repeated"]:
                    loss = float(str(fields["loss"]))
                    self._history.metrics(int(str(fields["round"])), held_out=loss)
                self._history.event(kind, **fields)
            case _:
                self._history.event(kind, **fields)

    def _round(self, fields: dict[str, object]) -> None:
        status = str(fields["status"])
        self.rounds[status] = self.rounds.get(status, 0) + 1
        self.last_round = int(str(fields["round"]))
        self._history.event(
            "round", **{name: fields[name] for name in ("stream", "round", "status", "peers")}
        )
        before, now = self._counted, self._total_bytes()
        self._counted = now
        named = {name: value for name, value in fields.items() if name != "peers"}
        self._history.receipt(
            **named,
            **self._decided_by(fields),
            sent_bytes=now[0] - before[0],
            received_bytes=now[1] - before[1],
        )

    def _decided_by(self, fields: dict[str, object]) -> dict[str, object]:
        stage = f"/{fields['stage']}" if "stage" in fields else ""
        verdict = self._verdict(f"{fields['stream']}{stage}", int(str(fields["round"])))
        return {} if verdict is None else asdict(verdict)
