"""A trainer that was killed goes on in the sequence of its samples."""

import asyncio

from worlds.pipeline_audit import TEXT, pipeline, plan
from worlds.waiting import until

from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.swarm.paths.policy import NUMBERS
from farflock.swarm.sim.virtual_time import run_virtual

TRAINER, BATCH, ENDLESS = 2, 8, 10**9


def test_a_killed_trainer_goes_on_with_the_first_batch_that_no_round_has_counted():
    async def main():
        world = PipelineWorld(parts(2, 1, 1), ENDLESS, view_s=2.0)
        sim = PipelineSimulation(plan(1, ENDLESS), pipeline(2, BATCH), world, TEXT)
        running = asyncio.create_task(sim.run())

        def counted():
            numbers = [fields["number"] for fields in sim.tale.fields("microbatch")]
            lives = dict.fromkeys(number // NUMBERS for number in numbers)
            return [{n % NUMBERS for n in numbers if n // NUMBERS == life} for life in lives]

        await until(lambda: sum(map(len, counted())) >= 5 * BATCH, 60)
        sim.kill(TRAINER, 3.0)
        await until(lambda: len(counted()) == 2 and len(counted()[1]) >= 2 * BATCH, 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return counted()

    first, second = run_virtual(main())
    assert min(second) >= 4 * BATCH, "hardly anything comes again"
    assert set(range(min(second))) <= first, "and nothing is passed over"
