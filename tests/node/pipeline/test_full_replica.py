"""A full replica's own training among scripted servers: what it gives, and when it holds back."""

import asyncio
import collections
from types import SimpleNamespace

import pytest
import torch

from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.full_replica import FullTrainer, LocalStage
from farflock.node.pipeline.passes.graphs import KeptGraphs
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.server import BACKWARD_COST
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource
from farflock.node.run.split import even
from farflock.swarm.paths.policy import NUMBERS
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=3, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
STAGES, TOKENS, PASS_S, FIRST = 3, 8, 1.0, 2 * NUMBERS


class Server:
    """Of one stage: it has what it was given until a test says that a step took it."""

    def __init__(self, span):
        self.accounts = self
        self.stage, self.here, self.taken = Stage(build(MODEL, 3, span).double()), [], 0
        self.passes = SimpleNamespace(graphs=KeptGraphs(self.stage))
        self.applied, self.rounds = -1, []
        self.own_given_up = []
        self.enough = True  # whether the stage's next step has all it needs

    def is_full(self):
        return self.enough

    async def contribute(self, key, staged, loss, number):
        await asyncio.sleep(0)
        self.here.append((key, staged, loss))
        self.rounds.append(number)

    def untaken(self, trainer):
        assert trainer == "me"
        return len(self.here) - self.taken


class ReplicaWorld:
    """The swarm as a full replica reads it; a pass takes its servers one virtual second a stage."""

    me = "me"

    def __init__(self, ahead=100, kept=100, order=lambda number: range(STAGES)):
        self.membership, self.is_member = self, True
        self.servers = [Server(span) for span in even(MODEL, STAGES)]
        self.closed, self.doubtful, self.events, self.costs = [], [], [], []
        self.left_out = []
        parts = [LocalStage(server, server) for server in self.servers]
        report = lambda kind, fields: self.events.append((kind, fields))  # noqa: E731
        self.order, self.stages = order, STAGES
        source = MicrobatchSource(self, SimpleNamespace(tokens=TOKENS), self, first=FIRST)
        self.trainer = FullTrainer(self, self, parts, source, ahead, kept, self, report)

    def stage_order(self, microbatch):
        return self.order(microbatch.step)

    def left(self):
        return ()

    def batch(self, number):
        drawn = torch.randint(
            0, 16, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number % NUMBERS)
        )
        return drawn[:, :-1], drawn[:, 1:]

    async def run_pass(self, work, cost):
        self.costs.append(cost)
        found = work()
        await asyncio.sleep(PASS_S * cost)
        return found

    def tokens(self):
        return 0

    def named(self):
        while self.closed:
            yield self.closed.pop(0)

    def skipped(self):
        return self.doubtful.pop() if self.doubtful else None

    def close(self, stage, *numbers, trainer="me"):
        self.closed.append((stage, [(trainer, number) for number in numbers]))

    def run(self, seconds, **at):
        """So many virtual seconds; `at_5=work` calls it after five of them."""

        async def main():
            loop = asyncio.get_running_loop()
            for moment, work in at.items():
                loop.call_later(float(moment.removeprefix("at_")), work)
            started_s = loop.time()
            await self.trainer.run(lambda: loop.time() - started_s >= seconds)

        run_virtual(main())
        return self.trainer

    def numbers(self, stage=0):
        return [number for (_, number), _, _ in self.servers[stage].here]


WHOLE_S = PASS_S * BACKWARD_COST * STAGES


def test_each_stage_has_the_gradient_of_the_unsplit_model_under_the_microbatchs_key():
    world = ReplicaWorld()
    world.run(2 * WHOLE_S)
    assert world.costs == [BACKWARD_COST * STAGES] * 2
    whole = Stage(build(MODEL, 3).double())
    for stage, server in enumerate(world.servers):
        assert [key for key, _, _ in server.here] == [("me", FIRST), ("me", FIRST + 1)]
        for (_, number), staged, loss in server.here:
            expected = whole.backward(*world.batch(number % NUMBERS))
            assert staged.tokens == TOKENS
            assert staged.gradients.keys() == dict(server.stage.model.named_parameters()).keys()
            for name, x in staged.gradients.items():
                torch.testing.assert_close(
                    x, expected.staged.gradients[name], rtol=1e-12, atol=1e-12
                )
            assert (
                loss is None
                if stage < STAGES - 1
                else loss == pytest.approx(float(expected.loss_sum), rel=1e-12)
            )
    losses = [fields["loss"] for kind, fields in world.events if kind == "loss"]
    assert world.trainer.commits.recent_loss == pytest.approx(sum(losses) / 2)
    assert losses[0] == pytest.approx(world.servers[-1].here[0][2] / TOKENS)


def test_one_that_leaves_a_stage_out_has_the_gradient_of_the_others_and_counts_without_it():
    world = ReplicaWorld(ahead=1, kept=1, order=lambda number: (0, 2))
    for server in world.servers:
        server.taken = 100
    trainer = world.run(
        4 * BACKWARD_COST, at_7=lambda: world.close(0, FIRST), at_8=lambda: world.close(2, FIRST)
    )
    assert world.costs == [2 * BACKWARD_COST] * 2
    assert world.servers[1].here == []
    assert (trainer.commits.finished, trainer.commits.doubled) == (1, 0)
    x, targets = world.batch(0)
    for server in (world.servers[0], world.servers[2]):
        x = server.stage.model(x)
    loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum")
    weights = dict(world.servers[0].stage.model.named_parameters())
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for name, x in world.servers[0].here[0][1].gradients.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-12)


def test_what_its_stages_gave_up_is_dropped_and_makes_room_for_more():
    world = ReplicaWorld(kept=1)

    def give_up():
        for server in world.servers:
            server.own_given_up = [("me", FIRST)]

    trainer = world.run(4 * WHOLE_S, at_15=give_up)
    assert world.numbers() == [FIRST, FIRST + 1]
    assert (trainer.commits.dropped, trainer.commits.finished, trainer.kept) == (STAGES, 0, 1)
    assert not any(server.own_given_up for server in world.servers)


def test_the_rounds_of_the_weights_are_those_of_the_moment_when_they_were_used():
    world = ReplicaWorld()

    def apply(stage, number):
        world.servers[stage].applied = number

    world.run(2 * WHOLE_S, at_5=lambda: apply(1, 4))
    assert [server.rounds for server in world.servers] == [[-1, -1], [-1, 4], [-1, -1]]


def test_what_a_round_left_out_as_too_late_is_dropped_and_does_not_count_as_finished():
    world = ReplicaWorld(ahead=2, kept=2)

    def close():
        for stage in range(STAGES):
            world.close(stage, FIRST, FIRST + 1)
        world.left_out += [(1, ("me", FIRST)), (0, ("me", FIRST + 99)), (2, ("you", FIRST + 1))]

    trainer = world.run(4 * WHOLE_S, at_25=close)
    assert (trainer.commits.finished, trainer.commits.dropped) == (1, 1)
    assert [fields for kind, fields in world.events if kind == "dropped"] == [
        {"number": FIRST, "stage": 1}
    ]
    assert world.left_out == []


def test_no_more_wait_for_a_step_that_is_due_than_may_be_late():
    world, seen = ReplicaWorld(ahead=3), []

    def take(*counts):
        seen.append(len(world.numbers()))
        for server, count in zip(world.servers, counts, strict=True):
            server.taken += count

    world.run(
        100, at_50=lambda: take(2, 3, 0), at_70=lambda: take(0, 0, 2), at_99=lambda: take(0, 0, 0)
    )
    assert seen == [3, 3, 5], "one stage had not stepped"


def test_a_step_that_lacks_something_is_not_waited_for_at_the_same_time_as_it_waits_for_this_peer():
    """As when others are gone, and what they had told with them."""
    world, seen = ReplicaWorld(ahead=3), []

    def enough(stage, enough):
        seen.append(len(world.numbers()))
        world.servers[stage].enough = enough

    for server in world.servers:
        server.enough = False
    world.run(100, at_40=lambda: enough(1, True), at_80=lambda: enough(0, True))
    assert seen[0] >= 4
    assert len(world.numbers()) == seen[1] <= seen[0] + 1


def test_no_more_wait_to_be_named_than_may_be_kept_and_one_counts_when_every_stage_has_named_it():
    world, seen = ReplicaWorld(kept=2), []
    for server in world.servers:
        server.taken = 100

    def close(*rounds, **who):
        seen.append((len(world.numbers()), world.trainer.commits.finished, world.trainer.kept))
        for stage, number in rounds:
            world.close(stage, number, **who)

    first, second = FIRST, FIRST + 1
    trainer = world.run(
        100,
        at_30=lambda: close((0, first), (1, first)),
        at_40=lambda: close((2, second)),
        at_50=lambda: close((2, first), trainer="somebody"),
        at_60=lambda: close((2, first)),
        at_80=lambda: close((0, FIRST + 99)),
    )
    assert seen == [(2, 0, 2)] * 4 + [(3, 1, 2)]
    assert (trainer.commits.finished, trainer.commits.doubled, trainer.commits.lost) == (1, 0, 0)
    assert [fields["number"] for kind, fields in world.events if kind == "microbatch"] == [first]


def test_what_is_named_twice_at_a_stage_is_told():
    world = ReplicaWorld(kept=1)
    world.run(2 * WHOLE_S, at_10=lambda: world.close(1, FIRST), at_11=lambda: world.close(1, FIRST))
    assert world.trainer.commits.doubled == 1


def test_rounds_that_no_peer_remembers_leave_what_waited_for_them_in_doubt():
    world = ReplicaWorld(ahead=2, kept=2)
    trainer = world.run(
        4 * WHOLE_S,
        at_20=lambda: [world.close(stage, FIRST, FIRST + 1) for stage in (0, 2)],
        at_21=lambda: world.close(1, FIRST),
        at_22=lambda: world.doubtful.append(1),
    )
    assert (trainer.commits.finished, trainer.commits.lost) == (2, 1)


def test_a_gradient_that_is_not_finite_counts_nowhere():
    world = ReplicaWorld()
    weight = next(iter(world.servers[1].stage.model.parameters()))
    kept = weight.detach().clone()

    def spoil():
        with torch.no_grad():
            weight.fill_(float("inf"))

    def mend():
        with torch.no_grad():
            weight.copy_(kept)

    trainer = world.run(4 * WHOLE_S, at_1=spoil, at_10=mend)
    assert trainer.spoilt == 1
    assert world.numbers(0) == world.numbers(1) == world.numbers(2) == [FIRST, FIRST + 2, FIRST + 3]
    assert trainer.kept == 3


def test_a_node_that_is_no_member_yet_or_must_stop_trains_nothing():
    world = ReplicaWorld()
    world.is_member = False
    world.run(2 * WHOLE_S)
    assert not world.costs
    world.is_member = True
    world.trainer.stopping = True
    world.run(2 * WHOLE_S)
    assert not world.costs
    assert world.trainer.waits() == []


def test_a_pass_is_of_one_moments_weights_and_each_stages_part_is_its_own():
    world = ReplicaWorld()
    world.run(3 * WHOLE_S)
    assert collections.Counter(map(len, (server.here for server in world.servers))) == {3: 3}
    names = [name for server in world.servers for name in server.here[0][1].gradients]
    assert sorted(names) == sorted(dict(build(MODEL, 3).named_parameters()))
