"""Kills of servers in an audited pipeline, each at a point of the protocol that a test names."""

import asyncio
import collections

from worlds.waiting import now, until


class ScheduledKills:
    """Kills of the server that reaches a point, after that point's delay. The next kill waits until
    every peer is back with the state of its stage: if only one server has a stage's last round,
    that round dies with it."""

    def __init__(self, audit, points, rest_s=2.0):
        self.audit, self.points, self.rest_s = audit, list(points), rest_s
        self.done, self.calm_s, self.turn = [], 0.0, 0
        audit.on_event = self.see

    def see(self, what, number):
        if not self.points or what != self.points[0][0] or not self.is_calm():
            return
        self.turn += 1
        if self.turn % 3:  # not always the first that comes by
            return
        self.done.append((self.points.pop(0), number))
        self.calm_s = now() + self.done[-1][0][1] + self.rest_s
        delay_s = self.done[-1][0][1]
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self.audit.sim.kill, number, 2.0)
        else:
            self.audit.sim.kill(number, 2.0)

    def is_calm(self):
        return now() > self.calm_s and self.audit.sim.settled and self.are_level()

    def are_level(self):
        """True if no server lacks a round that another one of its stage has applied."""
        applied = collections.defaultdict(set)
        for node in self.audit.sim.nodes.values():
            for serving in node.servings:
                applied[serving.index].add(serving.state_sync.applied_round)
        return all(len(rounds) == 1 for rounds in applied.values())

    async def until_all(self, sim):
        """End the run some time after the last of them."""
        await until(lambda: not self.points and self.is_calm())
        sim.end()


POINTS = [
    ("forward computed", 0.0),  # before its reply
    ("forward answered", 0.06),  # after
    ("backward begins", 0.05),
    ("backward computed", 0.0),
    ("backward computed", 0.03),  # the trainer does not have it
    ("backward computed", 0.12),  # the trainer has it
    ("confirm came", 0.0),
    ("confirm answered", 0.0),  # merged, and the trainer does not know
    ("confirm answered", 0.5),  # and the trainer knows
    ("offered", 0.0),
    ("offered", 0.05),
    ("offered", 0.1),
    ("offered", 0.2),
    ("closed", 0.0),
    ("closed", 0.1),
]
