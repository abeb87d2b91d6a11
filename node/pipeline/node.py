"""One node's part in a pipeline over one peer: a stage server, a trainer, both, or a full replica.

The ordinary driver, exchange client, state sync and loop sync the server's stage; a trainer holds
no weights. A full replica is the union of its stages: a server of each, and microbatches of its own
that never leave it (node/pipeline/full_replica.py). Processes and simulations both assemble nodes
here."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from farflock.node.assembly.coming_back import settled
from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.loop import Loop
from farflock.node.model.batches_ahead import ahead_of
from farflock.node.model.data import Batches, Start
from farflock.node.model.evaluation import HeldOut
from farflock.node.model.shapes import ShapeReplica
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.pipeline.evaluation import PathEvaluator, path_meter
from farflock.node.pipeline.full_replica import FullTrainer, LocalStage
from farflock.node.pipeline.lifecycle.assembly import Assembly, NodeServices, StageNode
from farflock.node.pipeline.lifecycle.beginning import SETTLE_S, StageStartup
from farflock.node.pipeline.lifecycle.end_copies import EndCopies
from farflock.node.pipeline.lifecycle.features import frozen_embedding, stage_inputs
from farflock.node.pipeline.lifecycle.first_weights import serve_first
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.lifecycle.last_mean import last_means
from farflock.node.pipeline.lifecycle.rebalancer import Rebalancer, stay_on_chain
from farflock.node.pipeline.lifecycle.reservations import reservations_of
from farflock.node.pipeline.passes.edges import Edges, edges_of
from farflock.node.pipeline.server.counting import STREAM as COUNTS
from farflock.node.pipeline.server.counting import stage_method
from farflock.node.pipeline.server.dispatch import Closed, Dispatch
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource, first_number
from farflock.node.pipeline.trainer.stage_directory import StageDirectory, StreamName
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.run.counts import count_steps
from farflock.node.run.policies import lane_of, policy_of, shares_of
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.evaluation_watch import EvaluationWatch, go_on
from farflock.node.train.exchange_client import ExchangeClient
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Exchange, RandomGroups
from farflock.swarm.messages import HeldState, Load
from farflock.swarm.peer.call_server import Handler
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.allowance import Allowance
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.tasks import cancel

ENDLESS = 2**62  # tokens
END_S = 30.0  # maximum wait for a stage's other servers and open rounds at the end of the run


class PipelineNode:
    """One life of one node: its `Part` (node/assembly/part.py) in a pipeline.

    `stage` is the stage that it serves: `NOTHING` for none, `EVERY` for a full replica. It
    trains if it is given `tokens`, the run's text, in which it begins at `start`. `saved` holds its
    last checkpoints, by stage."""

    coded_on = ""  # the CPU
    twin = ""  # no two servers of a stage have the same work

    def __init__(
        self,
        plan: RunPlan,
        pipeline: PipelinePlan,
        peer: Peer,
        means: NodeServices,
        stage: int,
        tokens: Text | None = None,
        saved: Mapping[int, Checkpoint] | None = None,
        start: Start = Start(),  # noqa: B008 - it cannot change
    ) -> None:
        self.peer, self.plan, self.pipeline, self.means = peer, plan, pipeline, means
        self._stage, self.saved = stage, saved or {}
        self.edges = edges_of(plan, pipeline)
        self.exchanges = StageExchanges(plan, pipeline)
        self._began_s = 0.0
        stages, serves_all = range(len(pipeline.stages)), stage == EVERY
        peer.branching.returning.axes = tuple(map(axes.axis, stages))
        self._streams = {index: self.exchanges.stream(index) for index in stages}
        self.embedding = self._frozen_embedding()
        assembly = Assembly(plan, pipeline, peer, means, self.edges, serves_all, self.embedding)
        served = [index for index in stages if serves_all or stage == index]
        self.servings = tuple(
            assembly.serving(index, self.exchanges.templates(index)[0]) for index in served
        )
        if self.servings:
            # before `run`: path policies ban servers that fail, but not slow ones
            handler = self._handler()
            peer.calls.handler = reservations_of(peer, len(pipeline.stages), handler)
            if not isinstance(handler, Closed):
                peer.codec_offers.reads = lambda: self.edges.reads
        for serving in self.servings:
            if (before := self.saved.get(serving.index)) is not None:
                # checkpoints are named and pruned by step, so the count continues
                serving.loop.step = serving.training_task.joined_at = before.step
        self._others = [index for index in stages if index not in served]
        self.stage_directory = StageDirectory(
            peer, self._streams, whole=pipeline.constrain == "all"
        )
        self.trainer = self._training(tokens, start) if tokens is not None else None
        self._counts = {index: stream.name for index, stream in self._streams.items()}
        self.last_means = last_means(plan, pipeline, peer, self._counts, means.report)
        self.evaluator: PathEvaluator | None = None  # None: the run is not evaluated here
        self.evaluates = False

    # start

    def found(self) -> None:
        """Start the run: this node's initial weights of its stages become the run's."""
        self.peer.found()
        self._look_on({})
        if self.evaluator is not None:
            self.evaluator.founds()
        for serving in self.servings:
            self._beginning(serving).found()
        self.peer.context.own.is_open = True

    async def resume(self, saved: Checkpoint) -> None:
        """Start the run again: each stage loads its own checkpoint by itself."""
        self.found()
        go_on(self.watch, saved.meta)

    async def join(
        self,
        records: Sequence[bytes],
        timeout_s: float,
        downloaded: DownloadProgress = lambda here, total: None,
    ) -> None:
        """Join through the members whose `records` are given, which answer within `timeout_s`, and
        get each served stage's state.

        The state is downloaded from a peer that has it; otherwise the stage starts over. If all
        members come back, each stage goes on from the newest state that any of them kept. A full
        replica does this for all stages at once: a stage that waited for the others would fall
        behind."""
        await self.peer.meet(list(records), timeout_s)
        await self.peer.membership.admission.find_room()
        beginnings = [self._beginning(serving) for serving in self.servings]
        if self.peer.context.views.newest.lists(self.peer.me):
            for beginning in beginnings:
                await beginning.recall()
        self._look_on(await settled(self.peer) or {})
        if self.evaluator is not None:
            self.evaluator.joins()
        comes = _Together(downloaded)
        tasks = [asyncio.ensure_future(b.enter(comes.download())) for b in beginnings]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)
        self.peer.context.own.is_open = True
        self.peer.ask_in()

    def _beginning(self, serving: StageNode) -> StageStartup:
        index = serving.index
        # The node has one embedding: a full replica asks for it once, with its first stage.
        embedding = self.embedding if index in (0, self._stage) else FrozenEmbedding()
        # With a founder's folder, initial weights are the run's first ones already.
        plan = self.plan if self.means.weights is None else replace(self.plan, weights=None)
        return StageStartup(
            plan=plan,
            pipeline=self.pipeline,
            serving=serving,
            templates=self.exchanges.templates(index),
            saved=self.saved.get(index),
            look_on=partial(self._open_as_onlooker, index),
            report=self.means.report,
            embedding=embedding,
        )

    def _look_on(self, begins: Mapping[int, HeldState]) -> None:
        for index in self._others:
            self._open_as_onlooker(index, begins.get(axes.axis(index), HeldState(0)))
        weights, means = self.means.weights, self.means
        if weights is not None:
            serve_first(self.peer, weights, self.pipeline, self._others, means.compute, means.spool)

    def _open_as_onlooker(self, index: int, begins: HeldState = HeldState(0)) -> None:  # noqa: B008 - it cannot change
        exchange_client = ExchangeClient(self.peer, self.plan.run_seed, index)
        for number, template in enumerate(self.exchanges.templates(index)):
            if not isinstance(template.group, RandomGroups):  # pairs decide alone
                exchange_client.look_on(template, begins.first - 1, begins.tokens, noted=not number)

    # status

    @property
    def serving(self) -> StageNode | None:
        """The stage that this node serves (the first one for a full replica), or None."""
        return self.servings[0] if self.servings else None

    @property
    def role(self) -> str:
        """The role in this node's record."""
        return role_of(self._stage)

    @property
    def step(self) -> int:
        """The steps of the served stage furthest behind; for a trainer, the microbatches begun."""
        if self.servings:
            return min(serving.loop.step for serving in self.servings)
        return self.trainer.source.begun if self.trainer else 0

    @property
    def tokens(self) -> int:
        """The agreed tokens of the slowest stage."""
        return self.stage_directory.tokens()

    @property
    def trained_tokens(self) -> int:
        """The tokens that this node's servers have merged or that its trainer has committed,
        whichever is larger."""
        merged = max((serving.server.served["merged"] for serving in self.servings), default=0)
        committed = self.trainer.commits.finished if self.trainer is not None else 0
        return self.edges.tokens * max(merged, committed)

    @property
    def last_loss(self) -> float | None:
        """The recent mean loss of the node's trainer, if it has one; otherwise the last loss of
        the first stage served."""
        if self.trainer is not None:
            return self.trainer.commits.recent_loss
        return self.serving.loop.losses.last if self.serving is not None else None

    @property
    def watch(self) -> EvaluationWatch | None:
        """The evaluations of the run, as far as this node knows."""
        return None if self.evaluator is None else self.evaluator.watch

    @property
    def work(self) -> dict[str, int]:
        """Counts of the servers' passes, summed over stages, and of the trainer's microbatches."""
        counts: dict[str, int] = {}
        if self.servings:
            served = [serving.server.served for serving in self.servings]
            counts |= {
                name: sum(each[name] for each in served)
                for name in ("forward", "backward", "merged", "busy")
            }
            apart = [each.counting for each in self.servings if each.counting is not None]
            if apart:
                counted = sum(each.tokens.counted for each in apart)
                unmerged = sum(each.tokens.unmerged for each in apart)
                tokens = self.edges.tokens
                counts |= {"counted": counted // tokens, "counted only here": unmerged // tokens}
                spreads = [each.spread for each in apart if each.spread is not None]
                counts |= {"ppm apart": round(1e6 * max(spreads))} if spreads else {}
        if self.trainer is not None:
            commits = self.trainer.commits
            counts |= {
                "microbatches": commits.finished,
                "under way": self.trainer.kept,
                "in doubt": commits.lost,
                "dropped": commits.dropped,
                "doubled": commits.doubled,
            }
            if self._streams[0].name.startswith(COUNTS):
                lost = self.stage_directory.lost_tokens // self.edges.tokens
                counts |= {"mixed": commits.mixed, "lost with servers": lost}
        if isinstance(self.trainer, Trainer):
            counts |= self.trainer.inputs.counts
        return counts

    @property
    def unmerged(self) -> bool:
        """True if work that counts is only in a server here, until its next merge."""
        return any(serving.is_unmerged for serving in self.servings)

    def waits(self) -> list[OpenWait]:
        """Return the peer's open rounds and the trainer's pending calls."""
        return self.peer.waits() + (self.trainer.waits() if self.trainer is not None else [])

    # running

    async def run(self, total_tokens: int) -> None:
        """Serve and train until every stage has `total_tokens`, or until `stop` is called."""
        self._began_s = _now()
        serve = [serving.server.run() for serving in self.servings]  # until all else ends
        if self._stage not in (NOTHING, EVERY):  # a full replica never moves
            needs_bytes = self.means.needs_bytes or (0,) * len(self.pipeline.stages)
            balance = self.pipeline.balance
            load, merged = self._load, self.servings[0].merged
            serve.append(Rebalancer(self.peer, balance, needs_bytes, load, merged).run())
        if self.pipeline.end_copies:
            known = self.plan, self.pipeline, self._counts
            serve += [
                EndCopies(self.peer, each.index, each.loop.driver, each.state_sync, *known).run()
                for each in self.servings
            ]
        serve += [self.embedding.run(), stay_on_chain(self.peer)]
        if self.evaluator is not None:
            serve += [self.evaluator.measure(), self.evaluator.record()]

        def has_tokens() -> bool:
            return self.stage_directory.tokens() >= total_tokens

        served, last = [serving.index for serving in self.servings], self.last_means
        serve.append(last.look_on(served, has_tokens))
        train = [
            last.after(each.loop.run(ENDLESS), partial(_drains, each.loop), each)
            for each in self.servings
        ]
        if self.servings:
            train.append(self._end(has_tokens))
        if (trainer := self.trainer) is not None:
            train.append(last.after(trainer.run(has_tokens), lambda: not trainer.stopping))
        tasks = [asyncio.ensure_future(work) for work in (*serve, *train)]
        rest, running = tasks[len(serve) :], set(tasks)
        try:
            while running.intersection(rest):
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in filter(ended.__contains__, tasks):
                    task.result()  # a failed server ends this life of the node
        finally:
            await cancel(*tasks)

    def _load(self, number: int) -> Load:
        """Return this server's load for rebalancing. A server that also trains reports no free
        memory, so that it is never moved."""
        assert self.serving is not None
        server = self.serving.server
        free_bytes = self.means.memory_bytes if self.trainer is None else 0
        age_s = _now() - self._began_s
        return Load(number, float(server.waiting), server.rate, free_bytes, age_s)

    async def _end(self, has_tokens: Callable[[], bool]) -> None:
        """Stop the loops once all stages have agreed on all tokens and their servers are done.

        Left alone, a loop follows the estimates of its own stage, and would end before the round
        that the others wait for. A server that left early could keep a state that no other
        server has."""
        while not (has_tokens() or self.stopping):  # noqa: ASYNC110 - two parts' conditions
            await asyncio.sleep(SETTLE_S / 10)
        # bounded, since a server that died may never say that it is done
        ends_s = _now() + END_S
        while not self.stopping and _now() < ends_s:
            over = [serving.batch.is_over() for serving in self.servings]
            if all(over):
                break
            await asyncio.sleep(SETTLE_S / 10)
        drain_s = 0.0 if self.stopping else END_S
        for serving in self.servings:
            serving.loop.stop(drain_s)

    @property
    def stopping(self) -> bool:
        """True if the node was told to stop."""
        has_stopped = self.trainer is not None and self.trainer.stopping
        return has_stopped or any(serving.loop.stop.requested for serving in self.servings)

    def stop(self) -> None:
        """Ask the loops and the trainer to end soon."""
        for serving in self.servings:
            serving.loop.stop()
        if self.trainer is not None:
            self.trainer.stopping = True

    # assembly

    def _frozen_embedding(self) -> FrozenEmbedding:
        """Return the frozen embedding; only a node that serves a stage needs its turns."""
        pipeline, stream = self.pipeline, self._streams[0].name
        turns = pipeline.turns if self._stage != NOTHING else None
        terms = self.plan.model, len(pipeline.stages), stream, self.means.compute
        return frozen_embedding(turns, self.edges.codec, self.peer, *terms)

    def _handler(self) -> Handler:
        if self._stage == EVERY and self.pipeline.constrain == "pipelines":
            return Closed(
                "this full replica is not constrained to the codec's subspace; "
                "ask a server of one stage"
            )
        servers = {serving.index: serving.server for serving in self.servings}
        return Dispatch(servers) if len(servers) > 1 else self.servings[0].server

    def _training(self, tokens: Text, start: Start) -> Trainer | FullTrainer:
        """Return a trainer that asks the servers of stages, or a full replica's own."""
        plan, pipeline, peer, edges = self.plan, self.pipeline, self.peer, self.edges
        policy = policy_of(pipeline.policy, pipeline.layers, plan.run_seed, peer.me, pipeline.paths)
        lane = lane_of(peer.me)
        first = first_number(peer.context.incarnation) + start.batch
        stream = SampleStream(plan.run_seed, peer.me)
        batches = Batches(tokens, stream, plan.batch, plan.seq, plan.samples, start)
        self.batches = ahead_of(batches, tokens)
        gone = None if pipeline.asynchronous is None else pipeline.asynchronous.gone
        source = MicrobatchSource(self.batches, edges, policy, lane, first, gone)
        terms, late, report = pipeline.trainer, _max_late(pipeline, edges), self.means.report
        if self._stage == EVERY:
            stages = [LocalStage(serving.server, serving.batch) for serving in self.servings]
            return FullTrainer(
                peer, self.stage_directory, stages, source, late, terms.kept, self.means, report
            )
        terms = replace(terms, window=min(terms.window, late))
        made = method(plan.method, **plan.options)
        steps = count_steps(made, plan.model.layers, pipeline.count_every)
        batch = max(steps * pipeline.batch_tokens // edges.tokens, 1)
        # a batch that is being agreed on, and what is in flight beside it
        allowance, inputs = (
            Allowance(batch, batch + max(batch, late)),
            stage_inputs(edges, batches),
        )
        given = policy, source, terms, report, inputs, allowance
        trainer = Trainer(peer, self.stage_directory, *given)
        trainer.client.returns = made.equality == "per-peer"
        return trainer


def evaluate(node: PipelineNode, every: int, held_out: Callable[[], HeldOut | None]) -> None:
    """Let a node that is not running yet take part in the run's evaluations, every so many rounds;
    `held_out` returns the sequences, or None as long as not all of them are here."""
    meter = path_meter(node.peer, node.stage_directory, node.edges, node.pipeline, held_out)
    known = node.peer, node.stage_directory, meter, every, node.means.report
    node.evaluator = PathEvaluator(*known, lambda: node.step)
    node.evaluates = True  # where all members serve stages, a server is drawn (decision 034)
    if isinstance(node.trainer, Trainer):  # a full replica can train where nobody can measure
        node.trainer.may_begin = node.evaluator.may_train


def _max_late(pipeline: PipelinePlan, edges: Edges) -> int:
    """Return the maximum number of microbatches in flight: one batch for each round by which a
    gradient may be late. With more, the last stage would get so far ahead of the first that
    later passes are too old for it."""
    return max(max(pipeline.server.staleness, 1) * pipeline.batch_tokens // edges.tokens, 1)


def _drains(loop: Loop) -> bool:
    """Return whether a loop was ended with those of all other servers of its stage."""
    return loop.stop.drain_s > 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()


class StageExchanges:
    """The exchanges of each stage's streams, made from shapes only: with real tensors a node would
    need memory for the whole model."""

    def __init__(self, plan: RunPlan, pipeline: PipelinePlan) -> None:
        self._plan, self._pipeline = plan, pipeline
        self.made: dict[int, list[Exchange]] = {}

    def templates(self, index: int) -> list[Exchange]:
        """Return one exchange for each stream of a stage."""
        if index not in self.made:
            shapes = shapes_of(self._plan.model, self._pipeline.stages[index])
            with torch.device("meta"):
                made = stage_method(self._plan, self._pipeline.count_every)
                self.made[index] = made.streams(ShapeReplica(shapes))
        return self.made[index]

    def stream(self, index: int) -> StreamName:
        """Return the first stream of a stage, whose rounds carry the microbatch ids."""
        first = self.templates(index)[0]
        pipeline = self._pipeline
        share = shares_of(pipeline.policy, pipeline.layers, pipeline.paths)[index]
        return StreamName(f"{first.key.stream}/{index}", first.key.round, first.stride, share)


class _Together:
    """The total progress of several downloads."""

    def __init__(self, downloaded: DownloadProgress) -> None:
        self._downloaded, self._downloads = downloaded, list[tuple[int, int]]()

    def download(self) -> DownloadProgress:
        """Return the callback through which one download reports its progress."""
        place = len(self._downloads)
        self._downloads.append((0, 0))

        def coming(here: int, total: int) -> None:
            self._downloads[place] = here, total
            here_bytes = sum(each[0] for each in self._downloads)
            total_bytes = sum(each[1] for each in self._downloads)
            self._downloaded(here_bytes, total_bytes)

        return coming
