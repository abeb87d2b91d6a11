"""Members that offer newcomers a state that is not the run's: nobody takes it."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from worlds.waiting import until

from farflock.node.train.state_sync import decode_state, encode_state
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

FOREVER = 10**9
STREAM = "delta"


def wrong(snapshot, ahead=0, tokens=0):
    """The same state with other weights, so many rounds ahead."""
    state = decode_state(snapshot)
    changed = {
        name: tensor + 1.0 if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    changed["next.delta"] = state["next.delta"] + ahead
    return encode_state(changed, snapshot.round + ahead, snapshot.tokens + tokens)


def wrong_bytes(snapshot):
    """What the hash of the true state does not belong to."""
    return replace(wrong(snapshot), round=snapshot.round, state=snapshot.state)


LIES = {
    "a wrong state": wrong,
    "one of round 2**61": lambda snapshot: wrong(snapshot, 2**61, 2**60),
    "one of the round before": lambda snapshot: wrong(snapshot, -1),
    "a right hash and wrong bytes": wrong_bytes,
}


def lying(node, lie):
    """Let a node offer `lie(its snapshot)` from now on."""
    snapshots, provide = node.peer.snapshots, node.state_sync.snapshot

    async def provided():
        return lie(await provide())

    snapshots.serve("state", provided)


@contextlib.asynccontextmanager
async def training(bench, text, honest, liars, **options):
    """A run of `honest` members and `liars`, which train with each other, and one peer to come."""
    made = bench(text, "diloco", peers=honest + liars + 1, period=4, deadline_s=8.0, **options)
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number in range(honest + liars):
            peer = await stack.enter_async_context(made.peer(number).running())
            nodes.append(made.node(peer))
            if number:
                await nodes[-1].join([made.record(0)], 60.0)
                await until(lambda peer=peer: peer.membership.is_member, 60, "admission")
            else:
                nodes[-1].found()
        loops = [asyncio.create_task(node.loop.run(FOREVER)) for node in nodes]
        counted = [f"{node.peer.me}" for node in nodes]
        await until(lambda: all(in_round(node, counted) for node in nodes), 120, "a round of all")
        newcomer = await stack.enter_async_context(made.peer(honest + liars).running())
        try:
            yield made, nodes[:honest], nodes[honest:], made.node(newcomer)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


def in_round(node, peers):
    """True if the newest round of a node has contributions of all these peers."""
    outcome = node.peer.decided(STREAM, node.peer.newest(STREAM))
    return outcome is not None and set(outcome.participants) >= set(peers)


@pytest.mark.parametrize(("honest", "members"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("lie", LIES)
def test_a_newcomer_takes_no_state_that_no_certified_list_names(bench, text, lie, honest, members):
    async def main():
        async with training(bench, text, honest, members - honest) as (made, nodes, liars, second):
            for liar in liars:
                lying(liar, LIES[lie])
            await second.join([made.record(number) for number in range(members)], 120.0)
            driver, position = second.loop.driver, second.loop.driver.position
            assert position.agreed_tokens <= nodes[0].loop.driver.position.agreed_tokens
            number = position.rounds[STREAM]
            for _ in range(1000):
                if (told := nodes[0].peer.decided(STREAM, number + 1)) is not None:
                    break
                await asyncio.sleep(0.1)
            mine = driver.method.agreed(driver.replica, STREAM)
            assert told.state == state_hash(mine)
            loop = asyncio.create_task(second.loop.run(FOREVER))
            await until(lambda: in_round(nodes[0], [second.peer.me]), 120, "a round with it")
            loop.cancel()
            accused = {each.peer for each in second.peer.context.accusations}
            assert accused <= {liar.peer.me for liar in liars}

    run_virtual(main())


def test_the_honest_offers_of_different_rounds_outweigh_one_that_claims_a_later_one(bench, text):
    """Each keeps its snapshot for some rounds, so that no two offer the same."""

    async def main():
        async with training(bench, text, 3, 1) as (made, nodes, (liar,), second):
            kept = []
            for node in nodes:
                await until(
                    lambda node=node: node.state_sync.applied_round > (kept or [-1])[-1], 60
                )
                made_then = await node.state_sync.snapshot()
                kept.append(made_then.round)

                async def provided(made_then=made_then):
                    return made_then

                node.peer.snapshots.serve("state", provided)
            assert len(set(kept)) == len(nodes)
            lying(liar, LIES["one of round 2**61"])
            await second.join([made.record(number) for number in range(4)], 120.0)
            assert second.loop.driver.position.rounds[STREAM] in kept

    run_virtual(main())
