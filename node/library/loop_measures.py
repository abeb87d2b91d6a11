"""Measures of a user's loop for its loggers, and the newest round of its swarm."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from farflock.node.sinks.measures import OUTCOMES, Measures, numbers

BUFFERS = "buffers"  # the stream of averaged buffers, which is no round of the method
SAMPLES = 100  # steps over which the pace and the busy share are measured


class RoundReport(NamedTuple):
    """A round and its status: `ok`, `partial`, `alone` or `failed`; `peers` includes this one."""

    stream: str
    number: int
    status: str
    peers: int


class LoopMeasures:
    """The rounds, the pace and the waits of one loop. They are kept apart from the optimizer, so
    that the loop does not keep it alive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_round: RoundReport | None = None
        self._adopted: list[str] = []
        self._rounds: collections.Counter[str] = collections.Counter()
        self._clock, self._tokens, self._waited_s = clock, 0, 0.0
        # after each step: (time in s, tokens trained, seconds of waiting for the swarm)
        start = (clock(), 0, 0.0)
        self._samples = collections.deque([start], maxlen=SAMPLES)

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Take one event of the loop."""
        if kind == "round" and fields["stream"] != BUFFERS:
            self.last_round = RoundReport(
                fields["stream"], fields["round"], fields["status"], fields["peers"]
            )
            self._rounds[self.last_round.status] += 1
        if kind == "adopt":
            self._adopted.append(fields["reason"])

    def adopted(self) -> list[str]:
        """Return why this peer has adopted the group's state, since it was last asked."""
        reasons, self._adopted = self._adopted, []
        return reasons

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as one in which the program does not compute."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - began_s

    def stepped(self, tokens: int) -> None:
        """Count a step of this many tokens."""
        self._tokens += tokens
        self._samples.append((self._clock(), self._tokens, self._waited_s))

    def numbers(self, tokens: int, traffic: tuple[int, int], peers: int) -> dict[str, float]:
        """Return measures by the names that they have everywhere, without the step and the loss,
        which the program knows better. `tokens` are the run's, `traffic` bytes sent and received.
        """
        (began_s, before, idle_s), (now_s, trained, waited_s) = self._samples[0], self._samples[-1]
        took_s = now_s - began_s
        return numbers(
            Measures(
                time_s=now_s,
                step=0,
                loss=None,
                tokens=tokens,
                tokens_per_s=(trained - before) / took_s if took_s else None,
                sent_bytes=traffic[0],
                received_bytes=traffic[1],
                busy_share=1 - (waited_s - idle_s) / took_s if took_s else None,
                peers=peers,
                **{f"rounds_{how}": self._rounds[how] for how in OUTCOMES},
            )
        )
