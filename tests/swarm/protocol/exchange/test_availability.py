"""Incremental updates must give the same result as looking through everything."""

import random

import pytest
from worlds.decisions import electorate_of

from farflock.swarm.protocol.exchange.availability import Availability, RoundItem, has

PLACES, MEMBERS, ME = 5, 4, 1
VOTERS = electorate_of(MEMBERS)


def digest(name):
    return bytes([name]) * 32


def item(index, name):
    return RoundItem(index, digest(name), 10, bytes([1 << name % MEMBERS]) + bytes(7))


def place(entry):
    return entry.index, entry.digest


class Slow:
    """A slow twin that looks through everything each time."""

    def __init__(self):
        self.items, self.held, self.corrupt, self.said = [], set(), set(), {}
        self.offered = set()

    def rivals(self, index):
        """The preferred one first: of a known offer, and of those the smallest."""

        def rank(entry):
            return not any(has(entry, member) for member in self.offered), entry.digest

        return sorted((entry for entry in self.items if entry.index == index), key=rank)

    def prefix(self, index):
        return next(
            (entry.digest[:8] for entry in self.rivals(index) if entry.digest in self.held),
            bytes(8),
        )

    def agreed(self):
        found = {}
        for index in range(PLACES):
            for entry in self.rivals(index):
                prefix = entry.digest[:8]
                said = {m for m, row in self.said.items() if row.get(index) == prefix} | {ME}
                if entry.digest in self.held and VOTERS.is_quorum(said):
                    found[index] = entry
                    break
        return found

    def check(self, quick):
        usable = self.held | self.corrupt
        row = dict.fromkeys(range(PLACES), bytes(8)) | dict(quick.changes)
        assert row == {index: self.prefix(index) for index in range(PLACES)}
        assert quick.agreed == self.agreed()
        assert quick.whole == all(entry.digest in usable for entry in self.items)
        assert quick.filled == all(self.prefix(index) != bytes(8) for index in range(PLACES))
        wanted = [entry for entry in self.items if entry.digest not in usable]
        assert sorted(quick.wanted(), key=place) == sorted(wanted, key=place)


def step(chance, quick, slow):
    match chance.randrange(5):
        case 0:
            entry = item(chance.randrange(PLACES), chance.randrange(1, 8))
            known = [rival.digest for rival in slow.rivals(entry.index)]
            fresh = entry.digest not in known and len(known) < MEMBERS
            assert quick.add(entry) == fresh
            slow.items += [entry] * fresh
        case 1:
            name = digest(chance.randrange(1, 8))
            quick.hold(name)
            slow.held.add(name)
        case 2:
            name = digest(chance.randrange(1, 8))
            if name not in slow.held:
                quick.spoil(name)
                slow.corrupt.add(name)
        case 3:
            member = chance.choice([0, 2, 3])
            changes = [
                (chance.randrange(PLACES + 2), digest(chance.randrange(8))[:8])
                for _ in range(chance.randrange(PLACES + 2))
            ]
            quick.hear(member, changes)
            slow.said.setdefault(member, {}).update(changes)
        case 4:
            member = chance.randrange(MEMBERS)
            quick.know_offer(member)
            slow.offered.add(member)


def test_every_step_leaves_what_looking_through_everything_finds():
    for seed in range(200):
        chance = random.Random(seed)
        quick, slow = Availability(PLACES, VOTERS, ME), Slow()
        for _ in range(40):
            step(chance, quick, slow)
            slow.check(quick)


def test_the_version_changes_with_what_is_agreed_and_only_then():
    availability = Availability(1, electorate_of(2), 0)
    availability.add(item(0, 3))
    assert availability.version == 0
    availability.hold(digest(3))
    assert (availability.version, list(availability.agreed)) == (1, [0]), (
        "the senior member of two is a quorum"
    )
    availability.hold(digest(3))
    availability.hear(1, [(0, digest(3)[:8])])
    assert availability.version == 1


@pytest.mark.parametrize("changes", [[], [(2, b"x" * 8), (2**32 - 1, bytes(8))], [(0, b"y" * 8)]])
def test_reports_of_any_places_are_taken(changes):
    availability = Availability(2, electorate_of(3), 0)
    availability.add(item(0, 3))
    availability.hold(digest(3))
    availability.hear(1, changes)
    assert availability.agreed == {}
