"""A node's records while it trains: each step's numbers, events, and a receipt per applied round.

A receipt has the round's participants and outcome, and the links' bytes since the last receipt.
"""

import logging
import sqlite3
from collections.abc import Callable

from farflock.node.state.history import History, HistoryUnusable

log = logging.getLogger(__name__)


class RunRecorder:
    """Records a loop's reports; `total_bytes` returns the bytes that the links have sent and
    received."""

    def __init__(self, history: History, total_bytes: Callable[[], tuple[int, int]]) -> None:
        self._history, self._total_bytes = history, total_bytes
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

    def close(self) -> None:
        """Close the history; what cannot be written then must not hide how the node ended."""
        try:
            self._history.close()
        except (HistoryUnusable, sqlite3.Error) as error:
            log.warning("the end of the run's history is lost: %s", error)

    def _note(self, kind: str, fields: dict[str, object]) -> None:
        match kind:
            case "step":
                self._history.metrics(int(str(fields["step"])), loss=float(str(fields["loss"])))
            case "round":
                self._round(fields)
            case "evaluation":
                self._history.event(kind, **fields)
                if fields["loss"] is not None:
                    loss, step = float(str(fields["loss"])), int(str(fields["step"]))
                    self._history.metrics(step, held_out=loss)
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
            **named, sent_bytes=now[0] - before[0], received_bytes=now[1] - before[1]
        )
