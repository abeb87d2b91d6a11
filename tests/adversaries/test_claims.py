"""A member that claims more than it can have done: nobody counts it, all say so, and the run goes
on without it."""

import asyncio
import itertools
import json

import msgspec
import pytest
from worlds.herd import STREAM, TOKENS, identity, in_virtual_time
from worlds.waiting import until

from farflock.swarm.messages import Key, Offer, Propose
from farflock.swarm.protocol.entitlement import Entitlement
from farflock.swarm.protocol.exchange.close_list import CloseList

MEMBERS, LIAR = 4, 3
ROUNDS = 6
TERMS = {"entitlement": Entitlement(tokens=2 * TOKENS)}


class Liar:
    """A member that takes part and contributes nothing, and tells all others the same lie about
    each round, again and again."""

    def __init__(self, herd):
        self.herd, self.node = herd, herd.nodes[LIAR]
        self.honest = [herd.nodes[number] for number in range(LIAR)]
        self.node.quiet = True

    @property
    def key(self):
        return Key(STREAM, self.node.peer.rounds.newest(STREAM) + 1)

    async def tell(self, lie):
        while True:
            said = lie(self)
            for node in self.honest:
                self.node.peer.context.send(node.id, said)
            await asyncio.sleep(0.3)

    def offer(self, **claim):
        cut = self.herd.stream.terms.cut
        payload = json.dumps({"name": f"lie {self.key.round}"}).encode()
        placed = self.node.peer.context.bundles.put(cut, [payload] * cut.shards, "lie")
        digests, sizes = zip(*placed, strict=True)
        said = {"weight": 1.0, "tokens": TOKENS, "state": self.honest[0].state} | claim
        return Offer(self.key, self.node.view.hash, digests, sizes, **said)

    def propose(self, **change):
        """A list without content, from the list before, in a ballot of the liar's own."""
        precedent = self.node.peer.rounds.streams[STREAM].precedent
        peers = self.node.view.peers
        close = CloseList(
            (),
            (),
            precedent.tokens,
            previous=precedent.hash,
            idle=precedent.idle_after(peers, ()),
            counted=precedent.counted_after(peers, ()),
        )
        value = msgspec.msgpack.encode(msgspec.structs.replace(close, **change))
        ballot = (1, peers.index(self.node.id))
        return Propose(self.key, self.node.view.hash, ballot, value)


CLAIMS = {
    "tokens": (lambda liar: liar.offer(tokens=2**40), "offer above its entitlement"),
    "weight": (lambda liar: liar.offer(weight=1e18), "offer above its entitlement"),
    "list": (
        lambda liar: liar.propose(tokens=2**60),
        "close list above its members' entitlement",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_whoever_claims_too_much_is_accused_by_all_and_the_others_train_on(claim):
    lie, what = CLAIMS[claim]

    @in_virtual_time(MEMBERS, **TERMS)
    async def main(herd):
        liar = Liar(herd)
        start = max(node.applied for node in liar.honest)
        telling = asyncio.create_task(liar.tell(lie))
        await until(
            lambda: min(node.applied for node in liar.honest) >= start + ROUNDS, 60, "rounds"
        )
        telling.cancel()
        for node in liar.honest:
            said = {(each.peer, each.what) for each in node.peer.context.accusations}
            assert said == {(identity(LIAR).peer, what)}
        participants = {
            peer
            for number, result in herd.results.items()
            if number > start + 1
            for peer in result[1]
        }
        assert participants == {node.id for node in liar.honest}

    main()


@in_virtual_time(MEMBERS, **TERMS)
async def test_a_member_that_claims_no_more_than_it_may_is_accused_by_nobody(herd):
    """So the lies are refused for what they claim, not for anything else in them."""
    liar = Liar(herd)
    start = max(node.applied for node in liar.honest)
    telling = asyncio.create_task(liar.tell(lambda liar: liar.offer()))
    await until(lambda: min(node.applied for node in liar.honest) >= start + ROUNDS, 60, "rounds")
    telling.cancel()
    assert not any(list(node.peer.context.accusations) for node in herd.nodes.values())


@in_virtual_time(MEMBERS, **TERMS)
async def test_an_honest_member_leaves_out_what_it_may_not_claim_and_is_accused_by_nobody(herd):
    late, others = herd.nodes[LIAR], [herd.nodes[number] for number in range(LIAR)]
    late.quiet = True
    start = max(node.applied for node in others)
    await until(lambda: min(node.applied for node in others) >= start + 3, 60, "rounds without it")
    exchange = late.peer.exchange
    late.peer.exchange = lambda *given, **said: exchange(*given, **said | {"tokens": 10**6})
    late.quiet = False
    back = max(node.applied for node in others)
    await until(lambda: late.served() and late.served()[-1] > back + 2, 60, "rounds with it")
    grown, rounds = [], sorted(herd.results)
    for before, number in itertools.pairwise(rounds):
        _, participants, tokens, _ = herd.results[number]
        of_others = TOKENS * len([peer for peer in participants if peer != late.id])
        grown.append(tokens - herd.results[before][2] - of_others)
    most = TERMS["entitlement"].tokens
    assert grown[-1] == most, "in a round after another it counts what a member may claim at most"
    assert 3 * most <= max(grown) <= 8 * most, "the rounds that it missed count too"
    assert not any(list(node.peer.context.accusations) for node in herd.nodes.values())
    herd.check_tokens = lambda: None  # they were checked here
