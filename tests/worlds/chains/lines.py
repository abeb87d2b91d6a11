"""Herds in which there may be several chains of views: the laws hold in each of them."""

import asyncio
import collections
import functools
import json

from worlds.herd import TOKENS, Herd, grown

from farflock.swarm.sim.virtual_time import run_virtual

AFTER_S = 20.0


class Lines(Herd):
    """A herd in which there may be several lines: the laws hold in each of them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.branch_after_s = AFTER_S
        self.by_view = {}  # by (hash of the round's view, round): result

    def agreed(self, node, outcome, contents, name):
        number = outcome.key.round
        place = (node.peer.context.views.at(number).hash, number)
        result = (contents, outcome.participants, outcome.tokens, node.state)
        assert self.by_view.setdefault(place, result) == result, (
            f"two results of round {number} in one view"
        )

    def check_line(self, *numbers):
        """Check that these nodes are on one line, in its view, and its log counts nothing twice."""
        chains = [self.nodes[number].peer.context.views for number in numbers]
        assert len({chain.newest.hash for chain in chains}) == 1
        assert all(self.nodes[number].peer.membership.is_member for number in numbers)
        counted, tokens, rounds = collections.Counter(), 0, 0
        for (digest, number), (contents, participants, after, _) in sorted(
            self.by_view.items(), key=lambda e: e[0][1]
        ):
            if chains[0].at(number).hash == digest:
                counted.update(
                    name for content in contents[:1] for name in json.loads(content)["names"]
                )
                tokens += TOKENS * len(participants) if contents else 0
                assert after == tokens, f"round {number} says {after} tokens, {tokens} were trained"
                rounds += 1
        assert max(counted.values()) == 1, counted
        assert rounds == 1 + max(
            number for digest, number in self.by_view if chains[0].at(number).hash == digest
        )

    def check_tokens(self):
        """Done by `check_line`."""


def lines(count, herds=Lines, **options):
    """Run a test `main(herd)` of `count` nodes in virtual time."""

    def decorate(main):
        @functools.wraps(main)
        def test():
            async def whole():
                herd = herds(**options)
                await grown(herd, count)
                await main(herd)
                await herd.end()
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        del test.__wrapped__  # pytest would look for a fixture `herd`
        return test

    return decorate


def ids(herd, *numbers):
    return {herd.nodes[number].id for number in numbers}


def progress(herd, *numbers):
    return min(herd.nodes[number].applied for number in numbers)


def names_of(herd, *numbers):
    return {herd.nodes[number].peer.membership.branch for number in numbers}


def is_one(herd, *numbers):
    """True if these nodes are all members of one newest view."""
    nodes = [herd.nodes[number] for number in numbers]
    if not all(node.peer.context.chain and node.peer.membership.is_member for node in nodes):
        return False
    return len({node.view.hash for node in nodes}) == 1 and nodes[0].members == {
        node.id for node in nodes
    }


def has_served_since(herd, moment_s, *numbers):
    return all(
        any(
            at_s > moment_s and status in ("ok", "partial", "alone")
            for at_s, _, status in herd.nodes[n].events
        )
        for n in numbers
    )
