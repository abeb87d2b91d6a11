"""Pipelines whose servers do not all read the same codecs: every server works, each edge has a
codec that both of its ends read, and each microbatch counts once with its gradient, also while
servers that know fewer codecs come and go."""

import collections
from dataclasses import replace

import pytest
from worlds.pipeline_audit import Audit, pipeline, plan
from worlds.waiting import until

from farflock.node.pipeline.passes.requests import Forward, decode_request
from farflock.node.simulate.pipeline import PipelineWorld, parts

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH, STAGES, SERVERS = 8, 3, 2
RUN, OLD = "raw | fp32", "fp32"


class Codecs(Audit):
    """Counts what passes are answered in: by stage and peer, the codec of the output."""

    def __init__(self, *given):
        super().__init__(*given)
        self.close = {"rtol": 1e-4, "atol": 1e-6}  # fp32 on some of the edges
        self.answered = collections.Counter()

    def watch(self, number, node):
        super().watch(number, node)
        for serving in node.servings:
            self._count(number, serving.server)

    def _count(self, number, server):
        serve = server.serve

        async def serving(caller, request, payloads):
            before = server.served["forward"]
            reply = await serve(caller, request, payloads)
            asked = decode_request(request)
            if isinstance(asked, Forward) and server.served["forward"] > before:
                self.answered[asked.stage, number, asked.sends.name.partition(",")[0]] += 1
            return reply

        server.serve = serving

    def codecs_of(self, stage):
        """The number of a stage's outputs in each codec."""
        counts = collections.Counter()
        for (at, _, codec), count in self.answered.items():
            counts[codec] += count * (at == stage)
        return +counts


def codecs(old, steps=4, seed=0, servers=SERVERS, **world):
    """A run in which these peers know fp32 alone. Peer s + STAGES·n is the n-th server of stage s,
    then comes the trainer."""
    total = 8 * BATCH * steps if steps else 10**9
    made = [
        replace(part, codec=OLD) if number in old else part
        for number, part in enumerate(parts(STAGES, servers, 1))
    ]
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | world
    return Codecs(
        plan(seed, total),
        pipeline(STAGES, BATCH, codec=RUN),
        PipelineWorld(tuple(made), total, **around),
    )


@pytest.mark.long  # the others' edges without an older release
def test_where_all_know_all_the_preferred_codec_is_used():
    one = codecs(old=()).run().check().check_finished()
    assert [set(one.codecs_of(stage)) for stage in (0, 1)] == [{"raw"}, {"raw"}]


def test_an_edge_with_an_older_release_has_what_that_reads_and_others_what_is_preferred():
    one = codecs(old={2 + STAGES}, steps=5).run().check().check_finished()
    assert set(one.codecs_of(0)) == {"raw"}
    edge = one.codecs_of(1)
    assert edge["fp32"] > 5 * edge["raw"], (
        "but for what was asked before anybody had told what it reads"
    )
    merged = collections.Counter(life.number for life, _, keys in one.taken for _ in keys)
    assert merged[2 + STAGES] > 8, "work goes to the older release, too"


@pytest.mark.long
def test_a_trainer_of_an_older_release_asks_for_what_it_knows():
    one = codecs(old={STAGES * SERVERS}).run().check().check_finished()
    assert [set(one.codecs_of(stage)) for stage in (0, 1)] == [{"fp32"}, {"fp32"}]


@pytest.mark.long
def test_when_the_older_release_is_gone_the_preferred_codec_comes_back():
    one = codecs(old={2 + STAGES}, steps=None)
    seen = []

    async def during(sim):
        await until(lambda: len(one.named[0]) >= 3, every_s=0.5)
        seen.append(one.codecs_of(1))
        sim.kill(2 + STAGES, None)
        done = len(one.named[0])
        await until(lambda: len(one.named[0]) >= done + 4, every_s=0.5)
        sim.end()

    one.run(during).check()
    late = one.codecs_of(1) - seen[0]
    assert seen[0]["fp32"] > seen[0]["raw"]
    assert late["raw"] > late["fp32"], "all that are left read it"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1, marks=pytest.mark.ci_more),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8)),
    ],
)
def test_while_peers_of_two_releases_come_and_go_nothing_is_lost_or_doubled(seed):
    one = codecs(old={1, 2 + STAGES}, steps=18, seed=seed, servers=3, churn_s=5.0)
    one.run().check()
    assert one.tale.kills > 2
    assert all(one.codecs_of(stage)["fp32"] for stage in (0, 1)), "the older release has served"
    # At the other edge the first passes, before anybody had told what it reads, may come too late.
    assert one.codecs_of(0)["raw"], "both codecs were in use"
