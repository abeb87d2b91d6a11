"""How busy a pipeline's stages are over slow lines, in virtual time, with the terms that a manifest
has by default."""

import pytest
from worlds.pipeline_audit import TEXT

from farflock.node.run.manifest import resolve
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")

STAGES, BATCH, SEQ = 3, 8, 8
FORWARD_S = 0.05
COST = 4.0  # of a microbatch at the busiest stage, in forward passes
WARM, MEASURED = 10 * BATCH, 12 * BATCH  # microbatches


def utilisation(round_trip_s, **pipeline):
    """Return the share of time in which the busiest stage computes. A frame crosses two lines in
    each direction."""
    described = resolve(
        {
            "model": {"preset": "tiny", "layers": STAGES, "tied": False},
            "train": {"batch": 1, "seq": SEQ},
            "data": {"sha256": "0" * 64},
            "pipeline": {"stages": STAGES, "batch": BATCH, **pipeline},
        }
    )
    link = LinkModel(latency_s=round_trip_s / 4, jitter_s=0.0)
    ends = (WARM + MEASURED + 2 * BATCH) * SEQ
    world = PipelineWorld(parts(STAGES, 1, 1, FORWARD_S), ends, link, view_s=2.0)

    async def main():
        return await PipelineSimulation(
            described.plan(), described.pipeline_plan(), world, TEXT
        ).run()

    over_s = [at_s for at_s, _, kind, _ in run_virtual(main()).events if kind == "microbatch"]
    took_s = over_s[WARM + MEASURED - 1] - over_s[WARM - 1]
    return MEASURED * COST * FORWARD_S / took_s


def test_without_latency_the_busiest_stage_always_computes():
    assert 0.97 <= utilisation(0.0) <= 1.0


def test_a_pipeline_that_does_not_wait_hides_a_latency_that_holds_up_one_that_does():
    waiting, asynchronous = utilisation(0.4), utilisation(0.4, asynchronous={})
    assert waiting < 0.6
    assert asynchronous > 1.5 * waiting
