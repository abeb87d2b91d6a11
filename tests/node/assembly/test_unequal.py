"""Unequal peers in one run: in rounds of a fixed time each contribution weighs as many as its
tokens."""

import asyncio

from farflock.swarm.sim.virtual_time import run_virtual

PACES = (0.5, 1.0, 4.0)  # seconds of a step: eight GPUs, four, one
TOKENS = 4480
OPTIONS = {"round_s": 12.0, "weights": "tokens", "codec": "int8", "deadline_s": 6.0}


class Ledger:
    """What each peer claims for a round, and the results that it applies."""

    def __init__(self):
        self.claimed, self.results = {}, {}

    def watch(self, node):
        driver, me = node.loop.driver, node.peer.me
        claim, resolve = driver.claim, driver.resolve

        def claimed(exchange):
            made = claim(exchange)
            self.claimed[me, exchange.key.round] = made.tokens
            return made

        def resolved(key, result):
            self.results[me, key.round] = result
            resolve(key, result)

        driver.claim, driver.resolve = claimed, resolved


async def train(bench):
    ledger, nodes = Ledger(), []

    async def live(number):
        async with bench.peer(number).running() as peer:
            node = bench.node(peer)
            nodes.append(node)
            ledger.watch(node)

            async def step(work):
                loss = work()
                await asyncio.sleep(PACES[number])
                return loss

            node.loop.train = step
            if number == 0:
                node.found()
            else:
                await node.join([bench.record(other) for other in range(number)], 60.0)
            while len(peer.context.views.newest.members) < len(PACES):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await node.run(TOKENS)

    async with asyncio.TaskGroup() as group:
        for number in range(len(PACES)):
            group.create_task(live(number))
            await asyncio.sleep(1.0)
    return ledger, nodes


def test_a_contribution_weighs_as_many_as_its_tokens(bench, text):
    ledger, nodes = run_virtual(train(bench(text, "diloco", len(PACES), TOKENS, **OPTIONS)))
    full = [result for result in ledger.results.values() if len(result.participants) == len(PACES)]
    assert len(full) >= 3 * len(PACES)
    for (_, number), result in ledger.results.items():
        if result.status in ("ok", "partial"):
            claimed = [ledger.claimed[peer, number] for peer in result.participants]
            assert list(result.weights) == claimed
    fast, slow = nodes[0].peer.me, nodes[-1].peer.me
    for result in full[len(PACES) :]:
        shares = dict(zip(result.participants, result.weights, strict=True))
        assert shares[fast] >= 4 * shares[slow]
    assert len({node.loop.driver.tokens for node in nodes}) == 1
