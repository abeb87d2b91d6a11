"""Corrections of late gradients in a pipeline that does not wait, as a run has them: each of them
changes the weights. The other tests of such pipelines are in test_asynchronous.py."""

import dataclasses

import pytest
from worlds.pipeline_audit import TOKENS, Audit, pipeline, plan

from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.network import LinkModel

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH, STEPS = 8, 3
HEAVY = InnerConfig("sgd", 0.1, weight_decay=0.0, momentum=0.9)


def last_stage(correction):
    """The hash of the last stage's weights and moments, after steps with late gradients."""
    total = TOKENS * BATCH * STEPS
    made = dataclasses.replace(plan(0, total, rate=0.3), inner=HEAVY)
    assert made.method == "ddp"
    terms = pipeline(
        2,
        BATCH,
        server=ServerTerms(lease_s=20.0, staleness=3),
        trainer=TrainerTerms(64, kept=128, forward_timeout_s=8.0, backward_timeout_s=12.0),
        asynchronous=Asynchronous(4, correction),
    )
    slow = LinkModel(latency_s=0.1)
    world = PipelineWorld(parts(2, 1, 1), total, slow, limit_s=900.0, view_s=2.0)
    one = Audit(made, terms, world).run()
    assert max(life.serving.server.passes.versions.age.epochs for life in one.lives) > 0
    [driver] = [life.serving.loop.driver for life in one.lives if life.stage == 1]
    state = driver.method.snapshot(driver.replica)
    return state_hash({name: x for name, x in state.items() if not name.startswith(TREND)})


def test_each_correction_of_late_gradients_trains_other_weights():
    corrections = ("none", "spike", "prediction", "spike+prediction", "braking")
    assert len({last_stage(correction) for correction in corrections}) == len(corrections)
