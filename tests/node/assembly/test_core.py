"""The parts of a core belong together: one stage, and one place for what a method keeps."""

import pytest
import torch

from farflock.node.assembly.core import Core
from farflock.node.simulate.chaos_methods import ChaosCase, CountingTask
from farflock.node.train.driver import Driver
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual


class Elsewhere(ChaosCase):
    """A case whose replicas keep a method's state on a device."""

    def replica(self, place):
        made = super().replica(place)
        made.allocate = lambda shape: torch.zeros(shape, device="meta")
        return made


def core_of(bench, case, **more):
    """A core, and the names of the states that its peer serves once that is opened."""

    async def main():
        async with bench(None).peer(0).running() as peer:
            replica = case.replica(0)
            made = Core.over(
                peer, Driver(case.make(), replica), CountingTask(replica), inline, inline, **more
            )
            peer.found()
            made.state_sync.open()
            return made, set(peer.snapshots.served)

    return run_virtual(main())


@pytest.mark.parametrize(("stage", "name"), [(None, "state"), (2, "state/2")])
def test_the_client_and_the_state_sync_are_of_the_same_stage(bench, stage, name):
    core, served = core_of(bench, ChaosCase("diloco"), stage=stage)
    assert core.client.stage == stage
    assert served == {name}


def test_results_come_where_the_replica_keeps_a_methods_state(bench):
    assert core_of(bench, ChaosCase("ddp"))[0].client.home.type == "cpu"
    assert core_of(bench, Elsewhere("ddp"))[0].client.home.type == "meta"
