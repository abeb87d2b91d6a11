"""A herd that may part into several lines of views, and what can be seen of these."""

import asyncio
import collections
import functools
import json

import msgspec
from worlds.herd import TOKENS, Herd, grown
from worlds.waiting import until

from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.messages import Lineage
from farflock.swarm.protocol.entitlement import Entitlement
from farflock.swarm.sim.virtual_time import run_virtual

AFTER_S = 20.0  # without a quorum, a branch begins


class Lines(Herd):
    """A herd in which there may be several lines: the laws hold in each of them."""

    def __init__(self, **options):
        super().__init__(**{"entitlement": Entitlement(tokens=2 * TOKENS), **options})
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
        assert not any(suspects(self.nodes[number]) for number in numbers), "nobody has lied"
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


def lines(count, **options):
    def decorate(main):
        @functools.wraps(main)
        def test():
            async def whole():
                herd = Lines(**options)
                await grown(herd, count)
                await main(herd)
                await herd.end()
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        del test.__wrapped__  # pytest would look for a fixture `herd`
        return test

    return decorate


def suspects(node):
    return {(each.peer, each.what) for each in node.peer.context.accusations}


def claim(node, tokens):
    """Let a node say of its line that it has so many tokens."""
    links, incarnation = node.peer.context.links, node.incarnation
    send = links.send

    def lie(peer, packed):
        said = unpack(packed).message
        if isinstance(said, Lineage):
            lied = msgspec.structs.replace(said, tokens=tokens)
            packed = pack(Frame(incarnation, lied))
        return send(peer, packed)

    links.send = lie


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


async def forked(herd):
    """Two lines, of nodes 0 to 2 and of 3 and 4, that never meet; newcomers reach both."""
    for one in (0, 1, 2):
        for other in (3, 4):
            herd.network.cut(herd.nodes[one].id, herd.nodes[other].id)
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
