"""Pipelines whose nodes have folders come back after a power cut, in whichever order they start."""

import asyncio
import copy
from dataclasses import dataclass, field, replace

import msgspec
import pytest
import torch
from worlds.pipeline_audit import TEXT, pipeline, plan
from worlds.waiting import until

from farflock.node.assembly.coming_back import VIEW
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.node.state.checkpoint import Checkpoint
from farflock.optimizers.parts.state import state_hash
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.frame import pack, unpack
from farflock.swarm.messages import ReturnAsk, Roll
from farflock.swarm.protocol import axes, views
from farflock.swarm.protocol.views import Chain
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")

STAGES, SERVERS, BATCH = 3, 2, 4
FOREVER = 10**9
SERVING = range(STAGES * SERVERS)
TRAINER = STAGES * SERVERS
EVERYBODY = range(TRAINER + 1)


@dataclass
class Disk:
    """What one node put on its disk: its views, and the last checkpoint of each stage."""

    views: tuple = ()
    goodbyes: dict = field(default_factory=dict)
    saved: dict = field(default_factory=dict)

    def keep(self, chain):
        self.views = tuple(views.encode(entry) for entry in chain.views)
        self.goodbyes = dict(chain.goodbyes)

    def chain(self, run):
        first, *others = map(views.decode_certified, self.views)
        chain = Chain(run, [first])
        for entry in others:
            chain.extend(entry)
        chain.goodbyes.update(self.goodbyes)
        return chain


class Homes(PipelineSimulation):
    """A pipeline of nodes with disks; a server saves after each `saves`-th step."""

    def __init__(self, saves=1, **options):
        total = FOREVER
        world = PipelineWorld(parts(STAGES, SERVERS, 1), total, view_s=2.0, limit_s=900.0)
        given = plan(options.pop("seed", 0), total, rate=0.1, **options)
        made = replace(given, dtype=torch.float32)  # a state that is fetched is as exact as here
        super().__init__(made, pipeline(STAGES, BATCH), world, TEXT, self.at_home)
        self.disks, self.saves = {number: Disk() for number in EVERYBODY}, saves

    def at_home(self, number, node):
        disk, sync = self.disks[number], node.peer.membership.sync
        if disk.views:
            sync.remember(disk.chain(node.peer.context.run))
        sync.store = disk.keep
        node.saved = dict(disk.saved)
        for serving in node.servings:
            if (before := disk.saved.get(serving.index)) is not None:
                serving.loop.step = before.step
            serving.loop.pause = self.saving(number, node, serving)

    def saving(self, number, node, serving):
        async def save():
            if serving.loop.step % self.saves == 0 and self.nodes.get(number) is node:
                self.disks[number].saved[serving.index] = saved(serving)

        return save

    def cut(self, *away):
        """Kill these nodes at once; each begins its next life after so many seconds."""
        for number, away_s in away:
            self.kill(number, away_s)

    def servers(self, stage):
        """The numbers of the servers of a stage, which are drawn."""
        return [number for number in SERVING if self.nodes[number].serving.index == stage]

    def progress(self):
        """The last round that each server has applied; -1 of one that is not there."""
        nodes = (self.nodes.get(number) for number in SERVING)
        return [-1 if n is None or n.serving is None else last_round(n.serving) for n in nodes]

    async def rounds(self, beyond):
        """Wait until all nodes are members of one view, and all servers have gone on by so much."""
        await until(
            lambda: (
                self.settled
                and len({node.peer.membership.branch for node in self.nodes.values()}) == 1
                and min(self.progress()) >= beyond
            ),
            400,
            f"rounds up to {beyond}, at {self.progress()}",
        )

    def check_states(self):
        """Servers of one stage that have applied the same round hold the same state."""
        held = {}
        for number in SERVING:
            serving = self.nodes[number].serving
            driver = serving.loop.driver
            state = state_hash(live_state(driver.method, driver.replica).shared)
            held.setdefault((serving.index, last_round(serving)), set()).add(state)
        assert all(len(states) == 1 for states in held.values())


def last_round(serving):
    return serving.state_sync.applied_round


def saved(serving):
    groups, cursors = checkpoint_state(serving)
    meta = {"node": cursors, VIEW: serving.state_sync.held.under.hex(), "tokens": 0}
    return copy.deepcopy(Checkpoint(None, serving.loop.step, groups, meta, {}))


def homes(work, **options):
    """Run `work(homes)` on a pipeline that has made a few rounds."""

    async def main():
        made = Homes(**options)

        async def worked():
            await made.rounds(4)
            await work(made)
            made.end()

        working = asyncio.ensure_future(worked())
        running = asyncio.ensure_future(made.run())
        await asyncio.wait([working, running], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            running.result()
        working.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return made

    return run_virtual(main())


def began(made):
    """The rounds with which the last return begins, by stage."""
    view = made.nodes[0].peer.context.views.branch
    assert view is not None, "it goes on by a return"
    return view.begins[1:]


def newest(made, stage):
    """The first round that is not in the newest checkpoint of a stage."""
    saved = [disk.saved[stage] for disk in made.disks.values() if stage in disk.saved]
    return 1 + max(min(each.meta["node"]["place"]["rounds"].values()) for each in saved)


@pytest.mark.parametrize("order", [1, -1])
def test_all_come_back_after_a_power_cut_and_each_stage_goes_on_from_its_newest_state(order):
    async def work(made):
        first, _ = made.servers(1)
        made.cut(*((number, 4.0 + 3.0 * place) for place, number in enumerate(EVERYBODY[::order])))
        del made.disks[first].saved[1]  # one of two servers of the stage has no checkpoint
        kept = [newest(made, stage) for stage in range(STAGES)]
        await made.rounds(max(kept) + 3)
        assert list(began(made)) == kept
        made.check_states()

    homes(work, saves=2)


def test_a_survivor_of_a_pipeline_gives_up_nothing_and_the_others_go_on_from_there():
    async def work(made):
        survives, other = made.servers(1)
        made.cut(*((number, 5.0) for number in SERVING if number != survives))
        del made.disks[other].saved[1]  # it may have saved a later round
        survivor = made.nodes[survives].serving
        at = last_round(survivor)
        await made.rounds(at + 4)
        assert made.nodes[survives].serving is survivor
        assert began(made)[1] >= at + 1
        made.check_states()

    homes(work)


def test_a_state_that_is_told_once_the_return_is_asked_for_is_the_one_with_which_that_begins():
    """Until then, the stage is known by a server with an older checkpoint."""

    async def work(made):
        late, other = made.servers(1)
        older = made.disks[other].saved[1]
        await made.rounds(newest(made, 1) + 4)
        made.cut(*((number, 5.0) for number in EVERYBODY))
        made.disks[other].saved[1] = older
        kept, me, asked = newest(made, 1), made.peers.identities[late].peer, []

        def hide(at_s, sender, to, packed):
            frame = unpack(packed)
            if isinstance(frame.message, ReturnAsk):
                asked.append(axes.at(views.decode_view(frame.message.view).begins, 1))
            elif sender == me and isinstance(frame.message, Roll) and not asked:
                return pack(replace(frame, message=msgspec.structs.replace(frame.message, held=())))
            return packed

        made.network.tap = hide
        await made.rounds(kept + 3)
        first = asked[0]
        assert first < kept, "the late server tells of its state after the first request"
        assert set(asked) == {first, kept}, "a state goes with its own round"
        assert began(made)[1] == kept
        made.check_states()

    homes(work)


def test_without_one_of_its_members_nothing_is_decided_and_the_others_say_for_whom_they_wait():
    async def work(made):
        me = made.peers.identities[5].peer
        made.cut(*((number, 5.0) for number in EVERYBODY if number != 5), (5, 60.0))
        await asyncio.sleep(40)
        assert all(node.peer.branching.returning.awaited == (me,) for node in made.nodes.values())
        await made.rounds(8)
        assert began(made)

    homes(work)
