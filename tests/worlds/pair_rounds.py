"""The two machines of a pair, and their whole rounds under random faults in virtual time."""

import random

from farflock.swarm.messages import (
    Key,
    Offer,
)
from farflock.swarm.protocol.pair import Pair

KEY = Key("pairs", 5)
DEADLINE_S = 10.0


def offer_of(peer):
    return Offer(KEY, bytes(32), (peer.encode() * 32,), (100,), 1.0, 10)


def pair(me, partner, *, leader, started_s=0.0):
    return Pair(KEY, me, partner, leader, offer_of(me), started_s, DEADLINE_S)


def lead():
    return pair("a", "b", leader=True)


def follow():
    return pair("b", "a", leader=False)


def said(side):
    out, side.outbox = side.outbox, []
    return out


STEP_S = 0.05
STEPS = int(DEADLINE_S / STEP_S) + 60


class Round:
    """One pair under loss, doubling, delay, cut links, crashes and late starts; `run` checks that
    it ends in an allowed way."""

    def __init__(self, seed, *, faults):
        self.chance = chance = random.Random(seed)
        self.loss = chance.choice([0.0, 0.1, 0.4]) if faults else 0.0
        starts = [chance.uniform(0, 3.0) if faults else 0.0 for _ in range(2)]
        self.sides = [pair("a", "b", leader=True), pair("b", "a", leader=False)]
        for side, start in zip(self.sides, starts, strict=True):
            side.started_s = start
        self.starts = starts
        self.cut_s = chance.uniform(0, DEADLINE_S) if faults and chance.random() < 0.2 else None
        self.crash = (
            (chance.randrange(2), chance.uniform(0, DEADLINE_S))
            if faults and chance.random() < 0.2
            else None
        )
        self.corrupt = faults and chance.random() < 0.05
        self.wire = []
        self.fetched_s = [None, None]
        self.crashed = set()

    def send(self, now_s, me, message):
        if self.cut_s is not None and now_s >= self.cut_s:
            return
        for _ in range(1 + (self.chance.random() < 0.1)):
            if self.chance.random() >= self.loss:
                self.wire.append((now_s + self.chance.uniform(0.02, 0.5), 1 - me, message))

    def step(self, now_s):
        due = [entry for entry in self.wire if entry[0] <= now_s]
        self.wire = [entry for entry in self.wire if entry[0] > now_s]
        for _, to, message in due:
            if to not in self.crashed and now_s >= self.starts[to]:
                self.sides[to].receive(now_s, message)
        for me, side in enumerate(self.sides):
            if self.crash is not None and self.crash[0] == me and now_s >= self.crash[1]:
                self.crashed.add(me)
            if me in self.crashed or now_s < self.starts[me]:
                continue
            self.tick(now_s, me, side)

    def tick(self, now_s, me, side):
        if now_s - self.starts[me] < STEP_S:
            side.start(now_s)
        if side.theirs is not None and self.fetched_s[me] is None:
            self.fetched_s[me] = now_s + self.chance.uniform(0.1, 2.0)
        cut = self.cut_s is not None and now_s >= self.cut_s
        arrived = self.fetched_s[me] is not None and now_s >= self.fetched_s[me]
        if arrived and side.stage == "matched" and not cut and 1 - me not in self.crashed:
            if self.corrupt and me == 0:
                side.lost(now_s)
            else:
                side.complete(now_s)
        side.tick(now_s)
        for message in said(side):
            self.send(now_s, me, message)

    def run(self):
        for number in range(STEPS + 70):
            self.step(number * STEP_S)
        for me, side in enumerate(self.sides):
            if me not in self.crashed:
                assert side.stage == "done", "a side was still waiting after its deadline"
        return self

    @property
    def verdicts(self):
        return [side.verdict for side in self.sides]
