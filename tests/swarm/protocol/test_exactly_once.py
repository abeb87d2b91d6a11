"""A trainer's ledger and its servers' staging together, over a network that loses, repeats and
reorders: no gradient counts twice, and each counts once as long as its trainer lives, whichever
servers die in between."""

import random

import pytest

from farflock.swarm.protocol.gradient_leases import GradientLeases
from farflock.swarm.protocol.ledger import Ledger

STAGES, SERVERS, TRAINERS, MICROBATCHES = 2, 3, 2, 6
EVERYTHING = {
    (stage, (str(trainer), number))
    for stage in range(STAGES)
    for trainer in range(TRAINERS)
    for number in range(MICROBATCHES)
}


class Server:
    def __init__(self, name, stage):
        self.name, self.stage, self.staging = name, stage, GradientLeases(places=3, lease_s=5.0)
        self.alive, self.applied, self.offered = True, -1, {}

    def offer(self, number):
        if self.alive and self.applied == number - 1 and number not in self.offered:
            self.offered[number] = self.staging.offer(number)


class LedgerWorld:
    """The trainer, its servers and the network, driven by one seed; `named` is what the close lists
    of each stage say, round by round."""

    def __init__(self, seed):
        self.random, self.now_s, self.wire, self.births = random.Random(seed), 0.0, [], 0
        self.trainers = [Ledger(STAGES) for _ in range(TRAINERS)]
        for ledger in self.trainers:
            for number in range(MICROBATCHES):
                ledger.begin(number)
        self.servers = [self.born(stage) for stage in range(STAGES) for _ in range(SERVERS)]
        self.named = {stage: [] for stage in range(STAGES)}
        # rounds that a trainer knows
        self.heard = [dict.fromkeys(range(STAGES), 0) for _ in range(TRAINERS)]
        self.gone = []  # (server, rounds it could be in)
        self.told = set()
        self.committed = set()

    def born(self, stage):
        self.births += 1
        server = Server(f"{stage}/{self.births}", stage)
        return server

    def post(self, *message):
        self.wire.append(message)

    def living(self, stage):
        return [server for server in self.servers if server.stage == stage and server.alive]

    # trainers

    def ask(self, trainer):
        ledger = self.trainers[trainer]
        for place in ledger.open():
            if self.random.random() < 0.5:
                server = self.random.choice(self.living(place[1]))
                self.post("backward", trainer, place, server, ledger.send(place, server.name))
        for place, peer, attempt in ledger.confirms():
            server = next((server for server in self.servers if server.name == peer), None)
            if server is not None:
                self.post("confirm", trainer, place, server, attempt)

    def give_up(self, trainer):
        ledger = self.trainers[trainer]
        for place, attempt in ledger.unanswered():
            if self.random.random() < 0.2:
                ledger.silent(place, attempt)

    def hear(self, trainer):
        """Tell the trainer of closed rounds, in order, and that a server is gone only after all of
        its rounds."""
        ledger, heard = self.trainers[trainer], self.heard[trainer]
        for stage in range(STAGES):
            if heard[stage] < len(self.named[stage]):
                names = self.named[stage][heard[stage]]
                ledger.committed(
                    stage, [number for whose, number in names if whose == str(trainer)]
                )
                heard[stage] += 1
        for server, rounds in self.gone:
            if heard[server.stage] >= rounds and (trainer, server.name) not in self.told:
                self.told.add((trainer, server.name))
                ledger.lost(server.stage, server.name)

    # the network

    def deliver(self, message):
        kind, trainer, place, server, attempt = message
        key, ledger = (str(trainer), place[0]), self.trainers[trainer]
        if kind in ("backward", "confirm", "computed", "revoke") and not server.alive:
            return
        match kind:
            case "backward":
                match server.staging.begin(key, attempt):
                    case "run":
                        self.post("computed", trainer, place, server, attempt)
                    case "again":
                        self.post(
                            "reply", trainer, place, server, server.staging._slots[key].attempt
                        )
                    case "busy":
                        self.post("busy", trainer, place, server, attempt)
            case "computed":
                answered = server.staging.staged(key, self.now_s)
                if answered is not None:
                    self.post("reply", trainer, place, server, answered)
            case "reply":
                if not ledger.replied(place, server.name, attempt):
                    self.post("revoke", trainer, place, server, attempt)
            case "busy":
                ledger.silent(place, attempt)
            case "confirm":
                done = server.staging.confirm(key, attempt)
                self.post(
                    "unknown" if done == "unknown" else "merged", trainer, place, server, attempt
                )
            case "merged":
                ledger.merged(place, attempt)
            case "unknown":
                ledger.refused(place, attempt)
            case "revoke":
                server.staging.revoke(key, attempt)

    def carry(self, loss):
        if self.wire:
            message = self.wire.pop(self.random.randrange(len(self.wire)))
            fate = self.random.random()
            if fate < loss and message[0] != "computed":
                return
            if fate < 2 * loss and message[0] != "computed":
                self.wire.append(message)  # it comes twice
            self.deliver(message)

    # the group

    def close(self, stage):
        """Close a round of a stage: each offered contribution may be in it, as a whole or not at
        all."""
        number = len(self.named[stage])
        for server in self.living(stage):
            if self.random.random() < 0.8:  # the rest are behind, or cut off
                while server.applied < number - 1:
                    self.apply(server)
                server.offer(number)
        offered = [
            server for server in self.servers if server.stage == stage and number in server.offered
        ]
        taken = [server for server in offered if self.random.random() < 0.7]
        names = [key for server in taken for key in server.offered[number]]
        assert len(set(names)) == len(names), (
            f"two servers of a round brought the same key: {sorted(names)}"
        )
        for key in names:
            assert (stage, key) not in self.committed, f"{key} counts twice at stage {stage}"
            self.committed.add((stage, key))
        self.named[stage].append(names)

    def apply(self, server):
        rounds = self.named[server.stage]
        if server.alive and server.applied + 1 < len(rounds):
            server.applied += 1
            server.staging.close(server.applied, rounds[server.applied])

    def die(self):
        server = self.random.choice(self.servers)
        if server.alive and len(self.living(server.stage)) > 1:
            server.alive = False
            # the open round may still have it
            self.gone.append((server, len(self.named[server.stage]) + 1))
            fresh = self.born(server.stage)
            fresh.applied = len(self.named[server.stage]) - 1  # with a snapshot
            self.servers.append(fresh)

    def step(self, loss, deaths):
        self.now_s += self.random.random()
        trainer = self.random.randrange(TRAINERS)
        for server in self.servers:
            server.staging.expire(self.now_s)
        match self.random.randrange(8):
            case 0:
                self.ask(trainer)
            case 1:
                self.give_up(trainer)
            case 2:
                self.hear(trainer)
            case 3:
                self.close(self.random.randrange(STAGES))
            case 4:
                self.apply(self.random.choice(self.servers))
            case 5 if self.random.random() < deaths:
                self.die()
            case _:
                for _ in range(4):
                    self.carry(loss)

    def run(self):
        """Run with faults for a while, then without, until all know that everything counts; return
        what did count."""
        for _ in range(600):
            self.step(loss=0.15, deaths=0.3)
        for _ in range(300):
            if self.done:
                break
            for trainer in range(TRAINERS):
                self.ask(trainer)
                self.give_up(trainer)
            while self.wire:
                self.carry(loss=0.0)
            for stage in range(STAGES):
                self.close(stage)
            for server in self.servers:
                self.apply(server)
            for trainer in range(TRAINERS):
                self.hear(trainer)
            self.now_s += 1.0
        return self.committed

    @property
    def done(self):
        for ledger in self.trainers:
            ledger.finish()
        return all(not len(ledger) for ledger in self.trainers)


@pytest.mark.parametrize(
    "first",
    [
        0,
        50,
        100,
        150,
        *(pytest.param(first, marks=pytest.mark.long) for first in range(200, 20_000, 200)),
    ],
)
def test_every_gradient_counts_exactly_once_whatever_happens(first):
    for seed in range(first, first + (50 if first < 200 else 200)):
        world = LedgerWorld(seed)
        assert world.run() == EVERYTHING, (
            f"seed {seed}: {sorted(EVERYTHING - world.committed)} never counted"
        )
        assert world.done, f"seed {seed}: a trainer does not know that all is committed"


def is_violated(seed):
    try:
        LedgerWorld(seed).run()
    except AssertionError as error:
        assert "counts twice" in str(error) or "brought the same key" in str(error)
        return True
    return False


def test_a_trainer_that_asks_again_too_early_is_caught(monkeypatch):
    """A planted bug: a server that dies is given up before its last round is known."""
    hear = LedgerWorld.hear

    def hasty(self, trainer):
        for server, _ in self.gone:
            self.trainers[trainer].lost(server.stage, server.name)
        hear(self, trainer)

    monkeypatch.setattr(LedgerWorld, "hear", hasty)
    assert any(map(is_violated, range(100)))


def test_a_server_that_merges_what_an_older_confirmation_meant_is_caught(monkeypatch):
    """A planted bug: the server ignores which attempt is confirmed."""
    confirm = GradientLeases.confirm

    def careless(self, key, attempt):
        return confirm(self, key, self._slots[key].attempt if key in self._slots else attempt)

    monkeypatch.setattr(GradientLeases, "confirm", careless)
    assert any(map(is_violated, range(100)))


def test_a_trainer_that_hears_answers_to_older_attempts_is_caught(monkeypatch):
    """A planted bug: any answer counts, whichever attempt it answers."""
    monkeypatch.setattr(Ledger, "_current", lambda self, place, attempt: self._entries.get(place))
    assert any(map(is_violated, range(700, 800)))


def test_a_server_that_forgets_what_it_refused_is_caught(monkeypatch):
    """A planted bug: a request that is repeated after its confirmation was refused is computed, and
    a late confirmation merges it."""
    monkeypatch.setattr(GradientLeases, "_refuse", lambda self, key, attempt: None)
    assert any(map(is_violated, range(100)))
