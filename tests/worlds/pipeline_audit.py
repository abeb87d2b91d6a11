"""An audit of a simulated pipeline: what its rounds applied must be what the unsplit model gives.

Every pass is recorded with the weights that it saw, and every payload with the pass that made it.
So the gradient that a microbatch must have at a stage is known, whatever path it took, however
often it was asked for, whichever servers died meanwhile and however far apart the weights were
along its way. It is that of the unsplit model whose stages have these weights, with activations as
the forward passes made them and derivatives by the weights of the backward passes.

Where the rate is too small to change a double, `STILL`, all of these are the initial weights, and
the unsplit model's gradient is computed once more without any of the records.
"""

import asyncio
import collections
import itertools

import torch
from torch.func import functional_call
from worlds.peers import end
from worlds.pipeline_records import Life, Pass, WatchedSums, Whole, counted

from farflock.node.data.samples import text_in_memory
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.stage_tensors import names_of
from farflock.node.pipeline.full_replica import FullTrainer
from farflock.node.pipeline.passes.requests import (
    Confirm,
    Done,
    Forward,
    decode_answer,
    decode_request,
)
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.passes import BackwardResult
from farflock.node.run.policies import lane_of, policy_of
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RunPlan, ServerTerms, TrainerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineSimulation
from farflock.node.train import microbatch_ids as notes
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.paths.policy import NUMBERS, Microbatch
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=4, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
TOKENS = 8  # of a microbatch
STILL = 1e-30  # a rate that no double notices
TEXT = text_in_memory(torch.arange(4000).mul(7).remainder(13).numpy().astype("uint16"))
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# rounds in the log, a snapshot or two of a stage of some kilobytes, payloads on their way
STORE_BYTES = 2**20
WIRE = {"rtol": 2e-5, "atol": 2e-6}  # rounds exchange fp32


def plan(seed=0, total=1, rate=STILL, **options):
    schedule = Schedule(rate, total, 0, 1.0, 0)
    inner = InnerConfig("sgd", rate, (0.9, 0.95), 0.0)
    given = {
        "method": "ddp",
        "options": {"codec": "fp32", "return_codec": "fp32"},
        "batch": 1,
        "seq": TOKENS,
    } | options
    return RunPlan(seed, MODEL, inner, schedule, clip_norm=None, dtype=torch.float64, **given)


def pipeline(stages=3, batch=8, codec="raw", **options):
    given = {
        "server": ServerTerms(lease_s=8.0),
        "trainer": TrainerTerms(window=6, kept=64, forward_timeout_s=4.0, backward_timeout_s=6.0),
    }
    return PipelinePlan(tuple(even(MODEL, stages)), batch * TOKENS, codec, **(given | options))


class Audit:
    """One simulated run in which every node is watched; call `check` after it has ended.
    `on_event(what, number)` is called with what the server of this peer number is just doing, so
    that tests can kill it there."""

    close = CLOSE  # of sums of gradients
    lossy = False  # whether activations arrive as others than they were computed: `arrived`
    check_means = True  # whether rounds are means of gradients, sent without loss

    def __init__(self, plan, pipeline, world):
        self.plan, self.pipeline, self.world = plan, pipeline, world
        self.lives = []  # of servers
        self.mixed_versions = 0  # gradients whose microbatch met weights of different rounds
        self.taken = []  # (life, sums, keys) of every step
        # by stage, round and peer, the backward passes of each key of its contribution
        self.brought = {}
        self.named = collections.defaultdict(dict)  # by stage and round, the keys
        # by stage and round, how late each key is that counts
        self.ages = collections.defaultdict(dict)
        # by stage and round, the results that servers applied
        self.applied = collections.defaultdict(dict)
        self.most = collections.Counter()  # the greatest numbers seen, of what must stay small
        self.events = collections.Counter()
        self.on_event = lambda what, number: None
        self.begun_anew = False  # whether a stage may be, with other weights than it had
        self.sim = self.evaluations = None
        self.reference = Stage(build(plan.model, plan.run_seed).double())
        self._stages = [build(plan.model, plan.run_seed, span).double() for span in pipeline.stages]
        # by stage and round, the weights that all servers of the stage have then:
        # one version, unless the stage was begun again
        self.versions = {}
        self.made_by = {}  # by payload, the pass that made it
        self._gradients, self._expected, self._policies, self._batches = {}, {}, {}, {}

    def run(self, during=None):
        async def main():
            self.sim = PipelineSimulation(
                *(self.plan, self.pipeline, self.world, TEXT, self.watch),
                evaluations=self.evaluations,
            )
            beside = [
                asyncio.create_task(work(self.sim))
                for work in (self._measure, during)
                if work is not None
            ]
            for task in beside:
                task.add_done_callback(
                    lambda task: task.cancelled() or not task.exception() or self.sim.end()
                )
            try:
                return await self.sim.run()
            finally:
                await end(*beside)

        run_virtual(main())
        return self

    @property
    def tale(self):
        """The events so far."""
        return self.sim.tale

    # what is recorded

    def watch(self, number, node):
        lives = [Life(number, serving.index, serving) for serving in node.servings]
        self.lives += lives
        for life in lives:
            self.watch_passes(life)
            self._watch_books(life, node.peer.me)
            self._watch_rounds(life)
        if node.trainer is not None and len(lives) == len(self.pipeline.stages):
            self._watch_whole(node, lives)

    def in_lockstep(self):
        """Let trainers begin a batch when all servers have applied the round before; return the
        audit."""
        look = self.watch

        def waiting(number, node):
            look(number, node)
            if node.trainer is not None:
                begin = node.trainer.begin_more
                node.trainer.begin_more = lambda: (
                    begin() if self.all_at(node.stage_directory.epoch) else None
                )

        self.watch = waiting
        return self

    def all_at(self, epoch):
        """Whether all servers have applied this round."""
        servings = [serving for node in self.sim.nodes.values() for serving in node.servings]
        return all(serving.state_sync.applied_round == epoch for serving in servings)

    def train_unsplit(self, number, keys, model, optimizer, whole):
        """Take step `number` of the unsplit model with these microbatches, and compare the weights
        of all stages with it."""
        gradients = [whole.backward(*self.batch(key)).staged.gradients for key in keys]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(entry[name] for entry in gradients) / (TOKENS * len(keys))
        optimizer.step()
        for stage in range(3):
            for weights in self.versions.get((stage, number), []):
                for name, x in weights.items():
                    expected = model.get_parameter(name).detach()
                    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)

    def note_event(self, what, life):
        self.events[what] += 1
        self.on_event(what, life.number)

    def watch_passes(self, life):
        server, passes, audit = life.serving.server, life.serving.server.passes, self
        begin_forward, begin_backward = passes.begin_forward, passes.begin_backward
        serve, stage = server.serve, server.stage

        def watched(compute):
            def computing(*given):
                life.used = dict(stage.model.named_parameters())
                if audit.pipeline.asynchronous is not None:  # else they are those of the round
                    life.used = {name: copied(x) for name, x in life.used.items()}
                return compute(*given)

            return computing

        for name in ("forward", "graph", "gradients"):
            setattr(stage, name, watched(getattr(stage, name)))

        # A device that runs ahead computes with the weights of when a pass begins.
        def forwarding(asked):
            life.used = None
            wait = begin_forward(asked)
            made = [life.used and audit.pass_of(life, audit.input_of(each)) for each in asked]

            def ended():
                replies, version = wait()
                for each, one, reply in zip(asked, made, replies, strict=True):
                    if isinstance(reply, bytes):
                        audit.made_by[audit.output_of(each, reply)] = one
                audit.note_event("forward computed", life)
                return replies, version

            return ended

        def going_back(asked):
            audit.note_event("backward begins", life)
            life.used = None
            wait = begin_backward(asked)
            if life.used is None:  # nothing was computed
                return wait
            given = audit.input_of(asked), audit.gradient_named(asked, asked.payloads[-1])
            one = audit.pass_of(life, *given, version=asked.request.version)

            def ended():
                found, version = wait()
                if isinstance(found, BackwardResult):
                    life.computed[asked.caller, asked.request.number] = one
                    names = [audit.gradient_named(asked, payload) for payload in found.payloads]
                    audit.made_by |= dict.fromkeys(names, one)
                return found, version

            return ended

        async def serving(caller, request, payloads):
            asked = decode_request(request)
            if isinstance(asked, Confirm):
                audit.note_event("confirm came", life)
            reply = await serve(caller, request, payloads)
            if isinstance(asked, Confirm):
                audit.note_event("confirm answered", life)
            elif isinstance(decode_answer(reply.body), Done):
                went = "forward answered" if isinstance(asked, Forward) else "backward computed"
                audit.note_event(went, life)
            return reply

        passes.begin_forward, passes.begin_backward = forwarding, going_back
        server.serve = serving

    def input_of(self, job):
        """Name the input that a pass was given."""
        return job.payloads[-1 if isinstance(job.request, Forward) else -2]

    def output_of(self, job, reply):
        """Name the output of a forward pass, as `input_of` names it where it arrives."""
        return reply

    def gradient_named(self, job, payload):
        """Name a gradient, alike where it is made and where it arrives."""
        return payload

    def arrived(self, named, value):
        """Return the activation of this name as it arrived, given the `value` that was sent."""
        return value

    def _watch_whole(self, node, lives):
        """A full replica's own microbatches."""
        compute, audit = node.trainer.compute, self

        def computing(servers, microbatch):
            audit.note_event("whole begins", lives[0])
            found = compute(servers, microbatch)
            weights = {name: x for life in lives for name, x in audit.weights_of(life).items()}
            for life in lives:
                life.computed[node.peer.me, microbatch.step] = Whole(life.stage, weights)
            audit.note_event("whole computed", lives[0])
            return found

        node.trainer.compute = computing

    def pass_of(self, life, x, outside=None, version=None):
        if self.pipeline.asynchronous is None:
            return Pass(
                life.stage,
                life.serving.state_sync.applied_round,
                self.weights_of(life),
                x,
                outside,
            )
        number = life.serving.state_sync.applied_round if version is None else version.round
        return Pass(
            life.stage, number, self._seen_weights((life.stage, number), life.used), x, outside
        )

    def weights_of(self, life):
        """Return this server's weights; every server of the stage with as many applied rounds has
        the same."""
        key = life.stage, life.serving.state_sync.applied_round
        if key[1] not in life.weights:
            life.weights[key[1]] = self._seen_weights(
                key, dict(life.serving.server.stage.model.named_parameters())
            )
        return life.weights[key[1]]

    def _seen_weights(self, key, now):
        now = {name: x.detach().cpu() for name, x in now.items()}
        for known in self.versions.setdefault(key, []):
            if all(torch.equal(known[name], x) for name, x in now.items()):
                return known
        versions = self.versions[key]
        assert self.begun_anew or not versions, (
            f"two servers of stage {key[0]} differ after round {key[1]}"
        )
        versions.append({name: x.detach().clone() for name, x in now.items()})
        return versions[-1]

    def _watch_books(self, life, peer):
        accounts, audit = life.serving.server.accounts, self
        add, take = accounts.sums.add, accounts.take
        brought, closed = accounts.brought, accounts.closed

        def adding(key, staged, loss, number):
            life.merged[key] = life.computed[key]
            add(key, staged, loss, number)

        def taking():
            waiting = list(accounts.sums.rounds)
            taken = take()
            audit.taken.append(
                (life, taken.staged, [key for key in waiting if key not in accounts.late])
            )
            return taken

        def bringing(number):
            noted = brought(number)
            # else it is over, and the contribution goes into the next one
            if number not in audit.named[life.stage]:
                audit.brought[life.stage, number, peer] = {
                    key: life.merged[key] for key in counted(noted)
                }
            audit.note_event("offered", life)
            return noted

        def closing(number, noted):
            keys = notes.joined([noted]) if noted else []
            known = audit.named[life.stage].setdefault(number, keys)
            assert known == keys, (
                f"two servers of stage {life.stage} heard different keys of round {number}"
            )
            audit.ages[life.stage][number] = counted(noted) if noted else {}
            closed(number, noted)
            audit.note_event("closed", life)

        accounts.take = taking
        accounts.sums = WatchedSums(accounts.sums, adding)
        accounts.brought, accounts.closed = bringing, closing

    def _watch_rounds(self, life):
        method, audit = life.serving.loop.driver.method, self

        class Watched(type(method)):
            __slots__ = ()

            def apply(self, replica, exchange, result):
                if result.mean is not None:
                    audit.applied[life.stage].setdefault(exchange.key.round, []).append(result)
                return super(Watched, self).apply(replica, exchange, result)

        method.__class__ = Watched

    async def _measure(self, sim):
        """Check repeatedly that each peer's tables stay small."""
        while True:
            await asyncio.sleep(0.25)
            for node in sim.nodes.values():
                sizes = {"store": node.peer.context.store.size_bytes}
                if node.trainer is not None:
                    sizes |= {"kept": node.trainer.kept, "tasks": tasks_of(node.trainer)}
                self._note_most(sizes)
                for serving in node.servings:
                    self._note_most(self._sizes_of(serving.server))

    def _sizes_of(self, server):
        pending, closed = server.pending, server.accounts.rounds_over
        sizes = {
            "staged": len(pending.gradients),
            "queued": server.waiting,
            "replies": len(pending.replies),
        }
        return sizes | {"slots": len(pending.staging), "closed": len(closed)}

    def _note_most(self, sizes):
        for what, size in sizes.items():
            self.most[what] = max(self.most[what], size)

    # what must hold

    def gradient(self, key):
        """Return the gradient of one microbatch's summed loss by the unsplit model with its initial
        weights, or by one made of the stages that it visits, in that order."""
        if key not in self._gradients:
            whole = self.order(key) == tuple(range(len(self._stages)))
            found = (
                self.reference.backward(*self.batch(key)).staged.gradients
                if whole
                else self._of_these(key)
            )
            self._gradients[key] = found
        return self._gradients[key]

    def _of_these(self, key):
        """Return gradients of the stages on a microbatch's path, and none of others."""
        x, targets = self.batch(key)
        visited = [self._stages[stage] for stage in self.order(key)]
        for model in visited:
            x = model(x)
        loss = torch.nn.functional.cross_entropy(
            x.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        names = {
            name: parameter for model in visited for name, parameter in model.named_parameters()
        }
        return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))

    def order(self, key):
        """Return the stages that a microbatch visits."""
        trainer, number = key
        if trainer not in self._policies:
            cut = self.pipeline
            self._policies[trainer] = policy_of(
                cut.policy, cut.layers, self.plan.run_seed, trainer, cut.paths
            )
        return self._policies[trainer].stage_order(Microbatch(number, 0, lane_of(trainer)))

    def batch(self, key):
        """Its tokens and targets."""
        plan, trainer = self.plan, key[0]
        if trainer not in self._batches:
            stream = SampleStream(plan.run_seed, trainer)
            self._batches[trainer] = Batches(TEXT, stream, plan.batch, plan.seq, plan.samples)
        return self._batches[trainer].batch(key[1] % NUMBERS)

    def gradient_of(self, key, back):
        """The expected gradients of the backward pass `back`, by name: one graph, all stages,
        with the activations of the forward and the derivatives of the backward passes."""
        if self.plan.inner.lr == STILL and not self.begun_anew and not self.lossy:
            return self.gradient(key)
        if isinstance(back, Whole):
            return self._whole_gradient(key, back)
        order = self.order(key)
        source = dict(zip(order[1:], order[:-1], strict=True))
        backs = {back.stage: back}
        for before, stage in itertools.pairwise(order[order.index(back.stage) :]):
            backs[stage] = self.made_by[backs[before].outside]
        forwards, x = {}, backs[order[-1]].x
        for stage in reversed(order[:-1]):
            forwards[stage] = self.made_by[x]
            x = forwards[stage].x
        for stage, one in backs.items():
            assert one.stage == stage
            assert stage == 0 or self.made_by[one.x] is forwards[source[stage]], (
                "a pass whose input is of another way"
            )
        mark = self._mark(key, back.stage, forwards, backs)
        if mark not in self._expected:
            rounds = {one.round for one in (*forwards.values(), *backs.values())}
            self.mixed_versions += len(rounds) > 1
            for stage, found in self._graph(key, back.stage, forwards, backs).items():
                self._expected.setdefault(self._mark(key, stage, forwards, backs), found)
        return self._expected[mark]

    def _mark(self, key, wanted, forwards, backs):
        """Name all that a stage's gradient on a microbatch depends on."""
        order = self.order(key)
        passes = *forwards.values(), *(backs[stage] for stage in order[order.index(wanted) :])
        inputs = [one.x for one in passes] if self.lossy else []
        return key, wanted, *(id(one.weights) for one in passes), *inputs

    def _whole_gradient(self, key, back):
        """Return the gradient by the unsplit model with the weights that the replica had."""
        mark = key, id(back.weights)
        if mark not in self._expected:
            tokens, targets = self.batch(key)
            leaves = {name: x.detach().requires_grad_() for name, x in back.weights.items()}
            x = functional_call(self.reference.model, leaves, (tokens,))
            loss = torch.nn.functional.cross_entropy(
                x.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            found = torch.autograd.grad(loss, list(leaves.values()))
            self._expected[mark] = dict(zip(leaves, found, strict=True))
        return self._expected[mark]

    def _graph(self, key, wanted, forwards, backs):
        """Return the gradients of the wanted stage and of all behind it, by stage and name."""
        x, targets = self.batch(key)
        order = self.order(key)
        leaves = {
            stage: {
                name: weight.detach().double().requires_grad_()
                for name, weight in backs[stage].weights.items()
            }
            for stage in order[order.index(wanted) :]
        }
        for place, stage in enumerate(order):
            there = forwards[stage].weights if stage in forwards else None
            with torch.no_grad():
                value = self.call_stage(stage, there, x) if there is not None else None
                if value is not None:
                    value = self.arrived((backs | forwards)[order[place + 1]].x, value)
            if place < order.index(wanted):
                x = value
                continue
            back = self.call_stage(stage, leaves[stage], x)
            x = back if value is None else back + (value - back).detach()
        loss = torch.nn.functional.cross_entropy(
            x.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        every = [weight for given in leaves.values() for weight in given.values()]
        found = iter(torch.autograd.grad(loss, every))
        return {stage: dict(zip(given, found, strict=False)) for stage, given in leaves.items()}

    def call_stage(self, stage, weights, x):
        """A stage's result with these weights, in double precision."""
        given = {name: w.double() for name, w in weights.items()}
        return functional_call(self._stages[stage], given, (x,), tie_weights=False)

    def expected(self, stage, passes):
        """The sum over microbatches, given the backward pass of each, by name."""
        found = [self.gradient_of(key, back) for key, back in passes.items()]
        names = names_of(self.plan.model, self.pipeline.stages[stage])
        return {
            name: sum((one[name] for one in found), torch.zeros((), dtype=torch.float64))
            for name in names
        }

    def check(self):
        """Check every sum that was taken, every mean that was applied, and every account."""
        # first stages first: their graphs give the gradients of the stages behind, too
        for life, staged, keys in sorted(self.taken, key=lambda step: step[0].stage):
            assert staged.tokens == TOKENS * len(keys)
            if keys:
                for name, x in self.expected(
                    life.stage, {key: life.merged[key] for key in keys}
                ).items():
                    require_close(copied(staged.gradients[name]).double(), x, **self.close)
        for stage, rounds in self.applied.items():
            for number, results in rounds.items():
                self._check_round(stage, number, results)
        for stage, rounds in self.named.items():
            listed = collections.Counter(key for keys in rounds.values() for key in keys)
            assert set(listed.values()) <= {1}, (
                f"stage {stage} counts some twice: {listed.most_common(3)}"
            )
        return self

    def _check_round(self, stage, number, results):
        """Check that each key of a round is that of exactly one of its contributions, and that its
        mean is theirs."""
        passes, keys = {}, sorted(self.ages[stage][number])
        for peer in results[0].participants:
            mine = self.brought[stage, number, peer]
            assert not mine.keys() & passes.keys(), (
                f"two contributions to round {number} of stage {stage} share some"
            )
            passes |= mine
        assert sorted(passes) == keys, (
            f"round {number} of stage {stage} names others than its contributions are made of"
        )
        for name, x in self.expected(stage, passes).items() if self.check_means else ():
            for result in results:
                mean = (x / (TOKENS * max(len(keys), 1))).float()
                require_close(result.mean[name], mean, **WIRE)

    def finished(self):
        """The microbatches that their trainers know to count at every stage."""
        done = set()
        for number, part in enumerate(self.world.parts):
            if part.trains:
                me = identity_of(self.plan, number).peer
                events = (
                    entry
                    for entry in self.tale.events
                    if entry[1] == number and entry[2] == "microbatch"
                )
                done |= {(me, fields["number"]) for _, _, _, fields in events}
        return done

    def heard_of(self, stage):
        """The keys in a stage's rounds at peers with a trainer: of one that was decided just before
        all its servers died, none of them took note."""
        nodes = [node for node in self.sim.nodes.values() if node.trainer is not None]
        return {
            key
            for node in nodes
            for name, state in node.peer.rounds.streams.items()
            if state.stream.stage == stage
            for number in (*state.old_log, *state.log)
            for key in notes.joined(node.peer.rounds.last_shards(name, number) or ())
        }

    def check_finished(self, patience_s=60.0):
        """Check that each microbatch that a trainer counts does count, at each stage; nothing is in
        doubt, and nothing waits for ever."""
        assert not sum(
            node.trainer.commits.lost
            for node in self.sim.nodes.values()
            if node.trainer is not None
        )
        for stage in range(len(self.pipeline.stages)):
            listed = {key for keys in self.named[stage].values() for key in keys}
            listed |= self.heard_of(stage)
            lacking = sorted(key for key in self.finished() - listed if stage in self.order(key))
            assert not lacking, f"stage {stage} lacks {lacking[:5]}"
        for node in self.sim.nodes.values():
            if node.trainer is not None:
                assert node.trainer.commits.doubled == 0
                oldest_s = min(begun_of(node.trainer), default=self.tale.virtual_s)
                assert self.tale.virtual_s - oldest_s < patience_s, (
                    "a microbatch that never comes to count"
                )
        return self

    def check_memory(self):
        """Check that no peer ever held more of anything than its terms allow."""
        server, trainer = self.pipeline.server, self.pipeline.trainer
        assert self.most["kept"] <= trainer.kept
        assert self.most["tasks"] <= trainer.kept * len(self.pipeline.stages)
        assert self.most["queued"] <= 2 * server.queue
        assert self.most["staged"] <= server.places
        assert self.most["replies"] <= server.places
        trainers = sum(part.trains for part in self.world.parts)
        assert self.most["slots"] <= server.places + trainers * trainer.kept
        assert self.most["store"] <= STORE_BYTES
        return self


def require_close(found, expected, *, rtol, atol):
    """As `torch.testing.assert_close`, which takes far longer where nothing is wrong. A small value
    may be the sum of large ones, so what is rounded off is measured by the largest."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    tolerance = {"rtol": rtol, "atol": atol * max(1.0, largest)}
    alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not (alike and torch.allclose(found, expected, **tolerance)):
        torch.testing.assert_close(found, expected, **tolerance)


def copied(x):
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True)


def begun_of(trainer):
    """Return the start times of its microbatches that do not count everywhere yet."""
    return list(trainer.commits.begun_s.values())


def tasks_of(trainer):
    """Return the number of tasks of the trainer's own; a full replica makes no requests, so it has
    none."""
    return 0 if isinstance(trainer, FullTrainer) else trainer.tasks
