"""E14: routing depends on the policy and the member list alone.

The same small pipeline sends its microbatches over real sockets in real time, and through the
simulator: each pass of each microbatch is computed by the same server.
"""

import asyncio
import collections
from functools import partial

import pytest
from worlds.peers import peer_over
from worlds.pipeline_audit import TEXT, pipeline, plan

from farflock.node.pipeline.lifecycle import rebalancer
from farflock.node.run.planned_paths import plan_of_texts
from farflock.node.simulate.pipeline import PeerRole, PipelineSimulation, PipelineWorld
from farflock.swarm.roles import role_of
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

pytestmark = [
    pytest.mark.net,
    pytest.mark.usefixtures("quiet_log"),
]

BATCH = 8  # microbatches
WALKED = 24  # microbatches that are compared, at least
FOREVER = 10**9  # tokens
STAGES = (0, 1, 1, 2, 2, 3)  # of the servers, in the order in which they come
PATHS = plan_of_texts(
    [["0:0 1:1 2:0 3:0", "0:0 2:1 1:0 3:0", "0:0 1:0 2:1 3:0", "0:0 2:0 1:1 3:0"]]
)
NAMES = ("fixed", "noloco", "planned")
SUSPECT_AFTER_S = 20.0  # a machine under load is slow to answer, and a suspect is not asked


class Traced(PipelineSimulation):
    """A pipeline whose peers come one by one, so that all of them see one member list.

    Its trainer starts when they are there. `trace` has the servers that computed each pass, by
    microbatch, stage and direction.
    """

    def __init__(self, cut):
        parts = (*(PeerRole(stage, forward_s=0.0) for stage in STAGES), PeerRole(trains=True))
        self.world = PipelineWorld(parts, FOREVER, view_s=0.1)
        super().__init__(plan(total=FOREVER), cut, self.world, TEXT, self._look)
        self.trace = collections.defaultdict(set)
        self.seen = set()  # the member lists that the trainer used, with the peers that were there

    async def walk(self):
        """Until enough microbatches count; ends all nodes."""
        try:
            for number in range(len(self.world.parts)):
                self.lives.tasks[number] = asyncio.create_task(self._live(number))
                await self._until(lambda number=number: self._are_members(number + 1))
            await self._until(lambda: self.nodes[len(STAGES)].trainer.commits.finished >= WALKED)
        finally:
            await cancel(*self.lives.tasks.values())
        return self

    async def _until(self, condition):
        while not condition():
            await self.lives.watch(0.02)

    def _are_members(self, many):
        chains = [node.peer.context.chain for node in self.nodes.values()]
        return len(chains) == many and all(
            chain is not None and len(chain.newest.members) == many for chain in chains
        )

    def _are_there(self, node):
        """True if all are members and this node hears each; on a busy machine one may seem gone."""
        port = node.peer.context
        there = self._are_members(len(self.world.parts))
        return there and not any(
            port.gone(port.views.newest, peer)
            for peer in port.views.newest.peers
            if peer != port.me
        )

    def _look(self, number, node):
        for serving in node.servings:
            self._watch(number, serving)
        if node.trainer is not None:
            trainer, begin, stage_directory = (
                node.trainer,
                node.trainer.begin_more,
                node.stage_directory,
            )
            trainer.begin_more = lambda: begin() if self._are_there(node) else None
            serving = stage_directory.serving

            def serving_seen():
                found = serving()
                if self._are_there(node):
                    self.seen.add(
                        (found.membership, found.seniority, tuple(map(len, found.stages)))
                    )
                return found

            stage_directory.serving = serving_seen

    def _watch(self, number, serving):
        passes, stage = serving.server.passes, serving.index
        forward, backward = passes.begin_forward, passes.begin_backward

        def forwarding(asked):
            for each in asked:
                self.trace[each.request.number, stage, "forward"].add(number)
            return forward(asked)

        def going_back(asked):
            self.trace[asked.request.number, stage, "backward"].add(number)
            return backward(asked)

        passes.begin_forward, passes.begin_backward = forwarding, going_back


class OverSockets(Traced):
    """The same nodes with links over loopback, in real time."""

    def __init__(self, cut):
        super().__init__(cut)
        self.sockets = []

    def _peer(self, number):
        self.peers.births += 1
        identity, terms, birth = self.peers.identities[number], self.peers.terms, self.peers.births
        options = LinkOptions(incarnation=birth, sequence=birth, suspect_after_s=SUSPECT_AFTER_S)
        links = ZmqLinks(identity, terms.run, options)
        self.sockets.append(links)
        record = partial(links.record, role=role_of(self._stages[number]))
        directory = self.peers.table.directory(identity.peer)
        return peer_over(links, identity, terms, birth, record=record, directory=directory)

    async def walk(self):
        try:
            return await super().walk()
        finally:
            for links in self.sockets:
                await links.close()


POLICIES = {
    name: pipeline(4, BATCH, policy=name, paths=PATHS if name == "planned" else None)
    for name in NAMES
}


@pytest.mark.ci_more
def test_each_pass_is_computed_by_the_same_server_as_in_the_simulator(monkeypatch):
    # Where servers start slowly, one would move to a stage whose own server is still to come.
    monkeypatch.setattr(rebalancer, "due_move", lambda balance, snapshot, before: None)

    async def over_sockets():  # all policies at the same time: most of it is waiting
        return await asyncio.gather(*(OverSockets(cut).walk() for cut in POLICIES.values()))

    for (name, cut), here in zip(POLICIES.items(), asyncio.run(over_sockets()), strict=True):
        require_equal(name, here, run_virtual(simulated(cut)))


async def simulated(cut):
    return await Traced(cut).walk()


def require_equal(name, here, there):
    assert here.seen == there.seen, "they went by other member lists"
    assert [sizes for _, _, sizes in here.seen] == [(1, 2, 2, 1)]

    both = here.trace.keys() & there.trace.keys()
    assert len({number for number, _, _ in both}) >= WALKED
    assert {key: here.trace[key] for key in both} == {key: there.trace[key] for key in both}
    assert all(len(servers) == 1 for servers in here.trace.values())
    used = set().union(*here.trace.values())
    assert {STAGES[number] for number in used} == {0, 1, 2, 3}
    assert (len(used) < len(STAGES)) == (name == "fixed"), (
        "a trainer has one server of each stage, or all by turns"
    )
