"""How busy a pipeline's stages are over slow lines, in virtual time, with the terms that a manifest
has by default."""

import itertools

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
WARM, MEASURED = 4 * BATCH, 4 * BATCH  # microbatches


def simulated(microbatches, round_trip_s, servers=1, trainers=1, **pipeline):
    """Return the events of a run. A frame crosses two lines in each direction."""
    described = resolve(
        {
            "model": {"preset": "tiny", "layers": STAGES, "tied": False},
            "train": {"batch": 1, "seq": SEQ},
            "data": {"sha256": "0" * 64},
            "pipeline": {"stages": STAGES, "batch": BATCH, **pipeline},
        }
    )
    link = LinkModel(latency_s=round_trip_s / 4, jitter_s=0.0)
    roles = parts(STAGES, servers, trainers, FORWARD_S)
    world = PipelineWorld(roles, microbatches * SEQ, link, view_s=2.0)

    async def main():
        return await PipelineSimulation(
            described.plan(), described.pipeline_plan(), world, TEXT
        ).run()

    return run_virtual(main())


def utilisation(round_trip_s, warm=WARM, measured=MEASURED, **pipeline):
    """Return the share of time in which the busiest stage computes."""
    tale = simulated(warm + measured + 2 * BATCH, round_trip_s, **pipeline)
    over_s = [at_s for at_s, _, kind, _ in tale.events if kind == "microbatch"]
    took_s = over_s[warm + measured - 1] - over_s[warm - 1]
    return measured * COST * FORWARD_S / took_s


def test_without_latency_the_busiest_stage_always_computes():
    assert utilisation(0.0, warm=2 * BATCH) == pytest.approx(1.0, abs=0.03)


@pytest.mark.long
def test_a_pipeline_that_does_not_wait_hides_a_latency_that_holds_up_one_that_does():
    waiting = utilisation(0.5, warm=2 * BATCH)
    asynchronous = utilisation(0.5, asynchronous={})
    assert waiting < 0.6
    assert asynchronous > 1.5 * waiting


@pytest.mark.long
@pytest.mark.parametrize(("round_trip_s", "least"), [(0.6, 0.75), (0.8, 0.6)])
def test_where_microbatches_come_back_too_late_to_count_fewer_set_out(round_trip_s, least):
    """A gradient counts up to 4 rounds late. If as many microbatches set out as hide the latency,
    most are later than that at the first stage, and are computed for nothing."""
    found = utilisation(round_trip_s, 10 * BATCH, 12 * BATCH, asynchronous={})
    assert found > least


@pytest.mark.long
def test_where_a_round_takes_longer_than_its_batch_it_takes_in_little_more_than_that():
    """Six trainers have six batches in flight, and each would hold more of them without waiting.

    Of the second halves of such runs, rounds took in 13.5 microbatches, with a standard error of
    1.2 over three round trips."""
    late = []
    for round_trip_s in (0.36, 0.38, 0.4):
        tale = simulated(28 * BATCH, round_trip_s, servers=4, trainers=6)
        agreed = {fields["round"]: fields["tokens"] for fields in tale.fields("round")}
        tokens = [agreed[number] for number in sorted(agreed)]
        sizes = [(after - before) / SEQ for before, after in itertools.pairwise(tokens)]
        late += sizes[len(sizes) // 2 :]
    assert sum(late) / len(late) < 2.5 * BATCH
