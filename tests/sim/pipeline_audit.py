"""Looks into a simulated pipeline and holds what its rounds applied against the unsplit model; tests load it by path.

The weights stand still (the rate is too small to change a double), so the gradient that a microbatch is to have at every stage
is that of the unsplit model, whatever path it took, how often it was asked for and who died meanwhile.
"""

import collections

import torch

from farflock.node import notes
from farflock.node.data import Batches
from farflock.node.model import ModelConfig, build
from farflock.node.participant import Plan
from farflock.node.pipeline import PipelinePlan
from farflock.node.pipeline_simulation import PipelineSimulation, identity_of
from farflock.node.stage import Stage, even
from farflock.node.stage_server import ServerTerms
from farflock.node.stage_tensors import names_of
from farflock.node.trainer import TrainerTerms
from farflock.optimizers.inner import InnerConfig
from farflock.optimizers.schedule import Schedule
from farflock.swarm.virtual import run_virtual

MODEL = ModelConfig(vocab_size=16, dim=8, layers=4, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False)
STILL = 1e-30  # a rate that no double notices
TEXT = torch.arange(4000).mul(7).remainder(13).to(torch.int64).numpy().astype("uint16")


def plan(seed=0, total=1, rate=STILL, **options):
    schedule = Schedule(rate, total, 0, 1.0, 0)
    inner = InnerConfig("sgd", rate, (0.9, 0.95), 0.0)
    given = {"method": "ddp", "options": {"codec": "fp32", "return_codec": "fp32"}, "batch": 1, "seq": 8} | options
    return Plan(seed, MODEL, inner, schedule, clip_norm=None, dtype=torch.float64, **given)


def pipeline(stages=3, batch=8, codec="raw", **options):
    given = {
        "server": ServerTerms(lease_s=8.0),
        "trainer": TrainerTerms(window=6, kept=64, forward_timeout_s=4.0, backward_timeout_s=6.0),
    }
    return PipelinePlan(tuple(even(MODEL, stages)), batch * 8, codec, **(given | options))


class Audit:
    """One simulated run with an eye on every server; `check` after it ended."""

    def __init__(self, plan, pipeline, world):
        self.plan, self.pipeline, self.world = plan, pipeline, world
        self.taken = []  # (stage, sums, keys) of every step
        self.named = collections.defaultdict(dict)  # by stage and round, the keys
        self.applied = collections.defaultdict(dict)  # by stage and round, the means that servers applied
        self.most = collections.Counter()  # the greatest numbers seen, of what must stay small
        self.sim = None
        whole = build(plan.model, plan.run_seed).double()
        self.reference = Stage(whole)
        self._gradients = {}

    def run(self, during=None):
        async def main():
            self.sim = PipelineSimulation(self.plan, self.pipeline, self.world, TEXT, self._look)
            if during is None:
                return await self.sim.run()
            import asyncio

            beside = asyncio.create_task(during(self.sim))
            try:
                return await self.sim.run()
            finally:
                beside.cancel()

        self.tale = run_virtual(main())
        return self

    def _look(self, number, node):
        if node.serving is not None:
            self._look_at_server(node.serving)
        if node.trainer is not None:
            self._look_at_trainer(node)

    def _look_at_server(self, serving):
        server, stage, audit = serving.server, serving.index, self
        take, closed = server.take, server.closed

        def taking():
            keys = list(server._in_sum)
            taken = take()
            audit.taken.append((stage, taken.staged, keys))
            audit.most["staged"] = max(audit.most["staged"], len(server._staged))
            audit.most["queued"] = max(audit.most["queued"], len(server._queue))
            return taken

        def closing(number, noted):
            keys = notes.joined([noted]) if noted else []
            known = audit.named[stage].setdefault(number, keys)
            assert known == keys, f"two servers of stage {stage} heard different keys of round {number}"
            closed(number, noted)

        server.take, server.closed = taking, closing
        method, apply = serving.loop.driver.method, type(serving.loop.driver.method).apply

        class Watched(type(method)):
            __slots__ = ()

            def apply(self, replica, exchange, result):
                if result.mean is not None:
                    audit.applied[stage].setdefault(exchange.key.round, []).append(result)
                return apply(self, replica, exchange, result)

        method.__class__ = Watched

    def _look_at_trainer(self, node):
        look = node.trainer._look_around

        def looking():
            look()
            self.most["kept"] = max(self.most["kept"], node.trainer.kept)
            self.most["store"] = max(self.most["store"], node.peer.port.store.size_bytes)

        node.trainer._look_around = looking

    # what must hold

    def gradient(self, key):
        """Of one microbatch's summed loss, by the unsplit model."""
        if key not in self._gradients:
            trainer, number = key
            batches = Batches(TEXT, self.plan.run_seed, trainer, self.plan.batch, self.plan.seq)
            self._gradients[key] = self.reference.backward(*batches.batch(number)).staged.gradients
        return self._gradients[key]

    def expected(self, stage, keys):
        names = names_of(self.plan.model, self.pipeline.stages[stage])
        return {
            name: sum((self.gradient(key)[name] for key in keys), torch.zeros((), dtype=torch.float64))
            for name in names
        }

    def check(self):
        """Every sum, every mean that was applied, and every account."""
        tokens = self.plan.batch * self.plan.seq
        for stage, staged, keys in self.taken:
            assert staged.tokens == tokens * len(keys)
            if keys:
                for name, x in self.expected(stage, keys).items():
                    torch.testing.assert_close(staged.gradients[name], x, rtol=1e-12, atol=1e-12)
        for stage, rounds in self.applied.items():
            for number, results in rounds.items():
                keys = self.named[stage][number]
                for name, x in self.expected(stage, keys).items():
                    for result in results:
                        wanted = (x / (tokens * max(len(keys), 1))).float()
                        torch.testing.assert_close(result.mean[name], wanted, rtol=2e-5, atol=2e-6)
        for stage, rounds in self.named.items():
            listed = collections.Counter(key for keys in rounds.values() for key in keys)
            assert set(listed.values()) <= {1}, f"stage {stage} counts some twice: {listed.most_common(3)}"
        return self

    def finished(self):
        """The microbatches that their trainers know to count at every stage."""
        done = set()
        for number, part in enumerate(self.world.parts):
            if part.trains:
                me = identity_of(self.plan, number).peer
                events = (entry for entry in self.tale.events if entry[1] == number and entry[2] == "microbatch")
                done |= {(me, fields["number"]) for _, _, _, fields in events}
        return done

    def check_finished(self):
        """What a trainer believes to count does count, at each stage, and nothing of it is in doubt."""
        for stage in range(len(self.pipeline.stages)):
            listed = {key for keys in self.named[stage].values() for key in keys}
            assert self.finished() <= listed, f"stage {stage} lacks {sorted(self.finished() - listed)[:5]}"
        for node in self.sim.nodes.values():
            assert node.trainer is None or node.trainer.lost == 0
        return self
