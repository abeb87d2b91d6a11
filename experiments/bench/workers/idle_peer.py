"""A worker of the idle benchmark: the node that stands still (number 0), or some of its partners.

`python -m farflock.experiments.bench.workers.idle_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import psutil

from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import Place
from farflock.node.process.entering import found
from farflock.node.process.network import MachineOptions
from farflock.node.process.node_process import NodeProcess
from farflock.node.run.manifest import Manifest, resolve
from farflock.node.state.paths import RunFolder
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.messages import Join, Ping, Pong, Views
from farflock.swarm.peer.admission import JOIN_EVERY_S
from farflock.swarm.peer.membership import PING_EVERY_S
from farflock.swarm.protocol.views import decode_certified
from farflock.swarm.record import unseal
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

INCARNATION = 1


class Settings(Place, frozen=True):
    """The number of partners, of all processes together; the node's folder; and the seconds before
    it admits them, all at once: partners do not vote."""

    partners: int
    folder: str
    view_s: float


def manifest(view_s: float) -> Manifest:
    """Return the run's manifest: a tiny model, and a method that exchanges nothing."""
    return resolve(
        {
            "run": {"name": "idle", "total_tokens": 1 << 40},
            "model": {"preset": "tiny"},
            "train": {"batch": 2, "seq": 16},
            "method": {"name": "local"},
            "exchange": {"view_s": view_s},
        }
    )


async def be_node(owner: Owner, settings: Settings) -> None:
    """Run a node that stands still after its first step, and say what it takes when asked."""
    started: asyncio.Future[NodeProcess] = asyncio.get_running_loop().create_future()

    def stand_still(node: NodeProcess) -> None:
        node.member.loop.pause = asyncio.Event().wait  # type: ignore[attr-defined]
        started.set_result(node)

    machine, terms = MachineOptions(RunFolder(Path(settings.folder))), manifest(settings.view_s)
    running = asyncio.create_task(found(machine, terms, stand_still))
    node = await started
    owner.say("record", record=node.links.record().hex(), run=node.run)
    daemons = psutil.Process().children(recursive=True)
    while not running.done():
        seconds = float((await owner.command("watch"))["seconds"])
        before = _clocks(daemons)
        await asyncio.sleep(seconds)
        spent_ms = [
            (after_s - before_s) * 1000 / seconds
            for before_s, after_s in zip(before, _clocks(daemons), strict=True)
        ]
        members = len(node.member.peer.context.views.newest.members)
        named = zip(("all_ms", "loop_ms", "daemon_ms"), spent_ms, strict=True)
        owner.say("took", members=members, **dict(named))


def _clocks(daemons: list[psutil.Process]) -> tuple[float, float, float]:
    """Return the processor seconds of this process, of this thread and of the daemons."""
    times = [daemon.cpu_times() for daemon in daemons]
    return time.process_time(), time.thread_time(), sum(one.user + one.system for one in times)


class Partner:
    """A member that only answers: its links, and the node as it knows it."""

    def __init__(self, links: ZmqLinks, node: str) -> None:
        self._links, self._node = links, node
        self.is_member = asyncio.Event()

    async def receive(self) -> None:
        """Answer the node's questions, and note the view that lists this partner."""
        while True:
            _, packed = await self._links.receive()
            match unpack(packed).message:
                case Ping(sent_s=sent_s):
                    self._say(Pong(sent_s, 0.0))
                case Views(views=encoded):
                    view = decode_certified(encoded[-1]).view
                    if view.lists(self._links.me):
                        self.is_member.set()

    async def ask(self) -> None:
        """Ask to join until admitted; then ask for the time, as members do."""
        while not self.is_member.is_set():
            self._say(Join(self._links.record()))
            await asyncio.sleep(JOIN_EVERY_S)
        while True:
            self._say(Ping(asyncio.get_running_loop().time()))
            await asyncio.sleep(PING_EVERY_S)

    def _say(self, message: Join | Ping | Pong) -> None:
        self._links.send(self._node, pack(Frame(INCARNATION, message)))


async def be_partners(owner: Owner, settings: Settings) -> None:
    """Join the node's run with this worker's share of the partners, and answer until the owner
    disconnects."""
    asked = await owner.command("join")
    run, blob = asked["run"], bytes.fromhex(asked["record"])
    numbers = range(settings.number, settings.partners + 1, settings.count - 1)
    async with asyncio.TaskGroup() as tasks:
        partners = [await _partner(run, blob, number) for number in numbers]
        for partner in partners:
            tasks.create_task(partner.receive())
            tasks.create_task(partner.ask())
        await asyncio.gather(*(partner.is_member.wait() for partner in partners))
        owner.say("joined")


async def _partner(run: str, blob: bytes, number: int) -> Partner:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    links = await ZmqLinks.open(identity, run, LinkOptions(incarnation=INCARNATION))
    links.learn(blob)
    return Partner(links, unseal(blob, run).peer)


async def main(settings: Settings) -> None:
    """Be the node or its partners until the owner disconnects or kills this process."""
    owner = await Owner.open()
    if settings.number > 0:
        await be_partners(owner, settings)
    await be_node(owner, settings)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
