"""Pipelines in which one server makes payloads that no peer can read, for as long as it lives: the
others carry on without it."""

from dataclasses import replace

import pytest
from worlds.pipeline_audit import Audit, pipeline, plan

from farflock.node.pipeline.server.passes import BackwardResult
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH, STAGES, SERVERS = 8, 3, 2
NONSENSE = b"\xff"  # of which no number is made


class Spoiling(Audit):
    """Of one server what goes forward, or back, is nonsense of the right size."""

    def __init__(self, liar, back, *given):
        super().__init__(*given)
        self.liar, self.back, self.spoilt = liar, back, 0

    def watch(self, number, node):
        super().watch(number, node)
        if number == self.liar:
            for serving in node.servings:
                self._spoil(serving.server)

    def _spoil(self, server):
        forward_all, backward_one = server.passes.forward, server.passes.backward

        def forward(jobs):
            replies, version = forward_all(jobs)
            return [
                self._nonsense(reply) if isinstance(reply, bytes) else reply for reply in replies
            ], version

        def backward(job):
            found, version = backward_one(job)
            if isinstance(found, BackwardResult):
                found = replace(found, payloads=tuple(map(self._nonsense, found.payloads)))
            return found, version

        if self.back:
            server.passes.backward = backward
        else:
            server.passes.forward = forward

    def _nonsense(self, payload):
        self.spoilt += 1
        return NONSENSE * len(payload)


def spoiling(liar, back=False, policy="swarm", servers=SERVERS, steps=6):
    """Peer s + STAGES·n is the n-th server of stage s, then comes the trainer."""
    total = 8 * BATCH * steps
    world = PipelineWorld(tuple(parts(STAGES, servers, 1)), total, limit_s=600.0, view_s=2.0)
    return Spoiling(liar, back, plan(0, total), pipeline(STAGES, BATCH, policy=policy), world)


@pytest.mark.parametrize(
    ("liar", "policy"),
    [
        (1 + STAGES, "swarm"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, "swarm"), (1, "fixed"))),
    ],
)
def test_with_a_server_whose_outputs_cannot_be_read_the_run_ends_and_each_microbatch_counts(
    liar, policy
):
    one = spoiling(liar, policy=policy, steps=3).run().check().check_finished()
    quarantine = [fields for _, _, kind, fields in one.tale.events if kind == "shunned"]
    assert {(entry["stage"], entry["peer"]) for entry in quarantine} == {
        (liar % STAGES, identity_of(one.plan, liar).peer)
    }
    assert one.spoilt >= len(quarantine) >= 1
    assert not [entry for entry in one.tale.events if entry[2] == "dropped"]


def test_gradients_that_cannot_be_read_cost_the_rest_of_their_microbatches_and_no_more():
    liar = 2
    one = spoiling(liar, back=True, steps=4).run().check().check_finished()
    assert [fields["stage"] for _, _, kind, fields in one.tale.events if kind == "shunned"]
    dropped = [fields["number"] for _, _, kind, fields in one.tale.events if kind == "dropped"]
    assert 0 < len(set(dropped)) <= one.spoilt
    assert len(dropped) == 2 * len(set(dropped)), "at both stages before the liar's"
    listed = {key for keys in one.named[0].values() for key in keys}
    assert len(listed) >= BATCH * 3, "the rest of the run is as it would be"
