"""Electorates, and what their voters sign; a group that decides a value under random schedules of
what is delivered, doubled or lost, and which member crashes."""

import random

from farflock.swarm.messages import Key
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.agreement.rules import AcceptanceRules
from farflock.swarm.protocol.votes import VoteTerms

# Whoever is let in votes from then on.
AT_ONCE = VoteTerms(after_rounds=0, per=0)
KEY, VIEW = Key("weights", 3), bytes(32)


def electorate_of(size, digest=bytes(32), learners=()):
    """An electorate of `size` members in their first lives, which vote but for the learners."""
    peers = tuple(f"peer{number}" for number in range(size))
    return Electorate(digest, peers, (1,) * size, frozenset(learners))


def votes(identities, run, key, electorate, ballot, value):
    """The certificate's votes of these {index: identity}."""
    text = signed_text(key, electorate, ballot, value)
    return tuple((index, each.sign(vote_domain(run), text)) for index, each in identities.items())


def one_is_a_quorum(patch):
    """Let any voter alone decide: the mistake that every agreement test must find."""
    patch.setattr(Electorate, "is_quorum", lambda self, voters: len(voters) >= 1)


class Ruled(AcceptanceRules):
    """Members for which some of the rules are different."""

    def __init__(self, **rules):
        for name, rule in rules.items():
            setattr(self, name, rule)


class Schedule:
    """Members and a bag of messages; chance decides which messages are delivered, doubled or lost,
    and which members crash."""

    def __init__(self, seed, size=None, loss=None, crashes=None, refusals=0.0):
        self.chance = random.Random(seed)
        self.size = size or self.chance.randint(1, 7)
        order = list(range(self.size))
        self.chance.shuffle(order)
        self.electorate = electorate_of(self.size, VIEW)
        self.refusals, self.refused = refusals, [set() for _ in range(self.size)]
        self.members = [
            Decision(
                KEY,
                self.electorate,
                me,
                tuple(order),
                rules=Ruled(refuses=lambda value, me=me: value in self.refused[me]),
            )
            for me in range(self.size)
        ]
        self.loss = self.chance.choice([0.0, 0.1, 0.4]) if loss is None else loss
        most = (self.size - 1) // 2 if crashes is None else crashes
        self.crash_left = self.chance.randint(0, most)
        self.crashed = set()
        self.bag = []
        self.proposed = set()
        self.seen = {}

    def send(self, sender, sends):
        for to, message in sends:
            if self.chance.random() >= self.loss:
                self.bag.append((sender, to, message))
            if self.chance.random() < 0.1:
                self.bag.append((sender, to, message))

    def deliver(self):
        sender, to, message = self.bag.pop(self.chance.randrange(len(self.bag)))
        if to not in self.crashed:
            self.send(to, self.members[to].receive(sender, message))
            self.observe(to)

    def propose(self, me):
        value = b"value of %d, try %d" % (me, len(self.proposed))
        self.proposed.add(value)
        self.send(me, self.members[me].propose(value))
        self.observe(me)

    def observe(self, me):
        """Check that a decision stays, and is the same at every member, crashed ones included."""
        value = self.members[me].decided
        if me in self.seen:
            assert value == self.seen[me], "a decision changed"
        elif value is not None:
            self.seen[me] = value
            assert set(self.seen.values()) == {value}, f"two values were decided: {self.seen}"
            assert value in self.proposed, f"{value} was never proposed"

    def refuse(self, me, value):
        """Make a member refuse the value for good, unless it has just accepted it."""
        accepted = self.members[me].accepted
        if accepted is None or accepted[1] != value:
            self.refused[me].add(value)

    def is_open(self, value, live):
        """True if it can no longer be known that a value was chosen: the members that could know
        are gone."""
        members = set(range(self.size)) - {me for me in live if value in self.refused[me]}
        is_quorum = self.electorate.is_quorum
        return is_quorum(members) and not is_quorum(members & set(live))

    def step(self):
        live = [me for me in range(self.size) if me not in self.crashed]
        if self.refusals and self.chance.random() < self.refusals:
            accepted = [member.accepted[1] for member in self.members if member.accepted]
            for me in range(self.size) if accepted else ():
                if self.chance.random() < 0.8:
                    self.refuse(me, self.chance.choice(accepted))
        draw = self.chance.random()
        if draw < 0.06:
            self.propose(self.chance.choice(live))
        elif draw < 0.12:
            me = self.chance.choice(live)
            self.send(me, self.members[me].retry())
        elif draw < 0.13 and self.crash_left and len(live) > 1:
            self.crash_left -= 1
            self.crashed.add(self.chance.choice(live))
        elif self.bag:
            self.deliver()

    def disturb(self, steps):
        for _ in range(steps):
            self.step()

    def calm_down(self, tries=2):
        """Stop losing messages and refusing values, and let each live member try some times, one
        after the other."""
        self.loss = self.refusals = 0.0
        live = [me for me in range(self.size) if me not in self.crashed]
        for me in live * tries:
            self.propose(me)
            while self.bag:
                self.deliver()
        return live
