"""A worker of the join benchmark: a member that trains, or a newcomer that joins when it is told.

`python -m farflock.experiments.bench.workers.join_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import sys

import msgspec
import torch

from farflock.experiments.bench.workers.bare import plan_of
from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import JOIN_TIMEOUT_S, Place, meet, member
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.train.state_sync import Spool
from farflock.optimizers.method import Result
from farflock.swarm.compute import Worker
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.round_log import traffic_of

TEXT = 100_000  # characters of the corpus
TOKENS = 1 << 40  # of the run, which has no end
STEP_S = 0.3  # between two steps: the processes share the machine's cores
POLL_S = 0.05


class Settings(Place, frozen=True):
    """The owner's settings: how many workers are members from the beginning, the model, the codec
    of both ways, and the seconds between rounds."""

    members: int
    preset: str
    codec: str
    round_s: float


def node_of(settings: Settings, peer: Peer, works: list[Worker]) -> ReplicaNode:
    """Return a node that trains little and exchanges often."""
    codecs = {"codec": settings.codec, "return_codec": settings.codec}
    plan = plan_of(settings.preset, 1, 16, "diloco", round_s=settings.round_s, **codecs)
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:TEXT]))
    state, steps, files = works
    node = replica_node(plan, peer, tokens, compute=state, train=steps, spool=Spool(files))
    node.loop.pause = lambda: asyncio.sleep(STEP_S)
    return node


class Counted:
    """The times of the rounds in which a node's contribution counts."""

    def __init__(self, me: str) -> None:
        self._me, self.at_s = me, list[float]()

    async def __call__(self, result: Result, step: int) -> None:
        """Note a round."""
        if self._me in result.participants:
            self.at_s.append(asyncio.get_running_loop().time())


async def be_member(owner: Owner, settings: Settings, node: ReplicaNode, counted: Counted) -> None:
    """Train with the other members, and say what happened when asked."""
    peer, place = node.peer, Place(settings.number, settings.members, settings.host)
    await meet(owner, peer, place, node.found, node.join)
    training = asyncio.create_task(node.run(TOKENS))
    owner.say("ready")
    while not training.done():
        await owner.command("tell")
        owner.say("told", rounds=counted.at_s, traffic=traffic_of(peer.rounds.streams))


async def join(owner: Owner, node: ReplicaNode, counted: Counted) -> None:
    """Join the members' run once they are known; say when the state is here, when all is caught up
    with and this is a member, and when a contribution counted."""
    peer, now = node.peer, asyncio.get_running_loop().time
    records = [bytes.fromhex(record) for record in (await owner.command("join"))["records"]]
    begun_s, heard = now(), list[tuple[int, int]]()
    received_bytes = peer.context.links.total_bytes()[1]
    await node.join(records, JOIN_TIMEOUT_S, lambda *said: heard.append(said))
    state_s, (_, state_bytes) = now() - begun_s, heard[-1]
    training = asyncio.create_task(node.run(TOKENS))
    while node.state_sync.is_behind or not peer.membership.is_member:  # noqa: ASYNC110 - no events
        await asyncio.sleep(POLL_S)
    joined_s = now()
    while not counted.at_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    owner.say(
        "joined",
        state_bytes=state_bytes,
        state_s=state_s,
        took_s=joined_s - begun_s,
        joined_s=joined_s,
        counted_s=counted.at_s[0] - begun_s,
        received_bytes=peer.context.links.total_bytes()[1] - received_bytes,
        steady=heard == sorted(heard),
    )
    await training


async def main(settings: Settings) -> None:
    """Be a member or a newcomer until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    owner = await Owner.open()
    works = [Worker(name) for name in ("state", "train", "files")]
    async with member(owner, settings, Worker("codec")) as peer:
        node, counted = node_of(settings, peer, works), Counted(peer.me)
        node.loop.counted = counted
        if settings.number < settings.members:
            await be_member(owner, settings, node, counted)
        else:
            await join(owner, node, counted)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
