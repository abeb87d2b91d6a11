"""The time and the content of a stage's step."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.passes.stage import MicrobatchGradient, Stage
from farflock.node.pipeline.server.accounts import Taken
from farflock.node.pipeline.server.task import LOOK_EVERY_S, BatchTrigger, StageTask, gated
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
MICROBATCH = 8  # tokens


class Merged:
    """A server that has merged what a test says."""

    def __init__(self):
        self.merged, self.tokens, self.absorbed, self.batches = asyncio.Event(), 0, 0, []

    def absorb(self):
        self.absorbed += 1

    def take(self):
        return self.batches.pop(0)


class Group:
    """The rounds and the tallies of a stage's group."""

    def __init__(self):
        self.changed, self.others, self.said, self.calls, self.round = (
            asyncio.Event(),
            0,
            [],
            False,
            3,
        )

    def newest(self, name):
        return self.round

    def called(self, name):
        return self.calls

    def say(self, name, stage, number, tokens):
        self.said.append((name, stage, number, tokens))

    def total(self, name):
        return self.others + self.said[-1][3]


def waiting(main):
    """Run a test `main(batch, server, group, stop)`; a batch is three microbatches."""

    def test():
        async def whole():
            server, group, stopped = Merged(), Group(), []
            batch = BatchTrigger(
                server, group, group, "grad/2", 2, 3 * MICROBATCH, stopping=lambda: bool(stopped)
            )
            await main(batch, server, group, lambda: stopped.append(True))

        run_virtual(whole())

    return test


async def until_full(batch, within_s=LOOK_EVERY_S):
    """The answer, and how long that took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.timeout(within_s + 0.001):
        full = await batch.full()
    return full, loop.time() - began_s


def later(after_s, change):
    asyncio.get_running_loop().call_later(after_s, change)


@waiting
async def test_a_step_is_due_once_the_group_has_a_batch_however_little_of_it_is_here(
    batch, server, group, stop
):
    def others_have():
        group.others = 2 * MICROBATCH
        group.changed.set()

    def one_is_here():
        server.tokens = MICROBATCH
        server.merged.set()

    later(0.1, others_have)
    later(0.2, one_is_here)
    full, took_s = await until_full(batch)
    assert full
    assert took_s == pytest.approx(0.2)
    assert group.said[-1] == ("grad/2", 2, 4, MICROBATCH)
    assert server.absorbed == len(group.said)


@waiting
async def test_less_than_a_batch_is_waited_on_for(batch, server, group, stop):
    group.others, server.tokens = 2 * MICROBATCH, MICROBATCH - 1
    with pytest.raises(TimeoutError):
        await until_full(batch, 5.0)


@waiting
async def test_whether_the_next_step_has_enough_is_known_and_told_also_while_a_round_is_open(
    batch, server, group, stop
):
    group.others, server.tokens = MICROBATCH, 2 * MICROBATCH
    assert (await until_full(batch))[0]  # and now its round is open, with all of this
    absorbed = server.absorbed
    assert not batch.is_full()
    server.tokens = 5 * MICROBATCH
    assert batch.is_full()
    assert group.said[-1] == ("grad/2", 2, 4, 5 * MICROBATCH), "others do not know what is here"
    assert server.absorbed == absorbed, "what a round says is taken in between steps"
    group.round, told = 4, len(group.said)
    server.tokens = 6 * MICROBATCH
    batch.is_full()
    assert len(group.said) == told, "it would count again what the round has counted"


@waiting
async def test_the_second_step_of_a_round_is_due_with_the_second_batch(batch, server, group, stop):
    group.others = 3 * MICROBATCH
    assert await until_full(batch) == (True, 0.0)
    with pytest.raises(TimeoutError):
        await until_full(batch, 2.0)
    group.others = 6 * MICROBATCH
    assert (await until_full(batch))[0]
    group.round, group.others = 4, 3 * MICROBATCH
    assert (await until_full(batch))[0], "with a round the count begins anew"
    assert group.said[-1][2] == 5


@waiting
async def test_a_round_that_others_have_called_is_joined_with_whatever_is_here(
    batch, server, group, stop
):
    def call():
        group.calls = True

    later(0.1, call)
    full, took_s = await until_full(batch)
    assert full
    assert took_s <= LOOK_EVERY_S + 1e-6
    assert server.tokens == 0


@waiting
async def test_while_an_exchange_of_its_own_is_open_others_call_in_vain(batch, server, group, stop):
    group.calls, is_open = True, [True]
    batch.is_open = lambda: bool(is_open)
    later(0.1, is_open.clear)
    later(0.1, group.changed.set)
    full, took_s = await until_full(batch)
    assert full
    assert took_s == pytest.approx(0.1)


@waiting
async def test_a_task_that_must_stop_waits_for_no_batch(batch, server, group, stop):
    later(0.1, stop)
    full, took_s = await until_full(batch)
    assert not full
    assert 0.1 <= took_s <= LOOK_EVERY_S + 1e-6


@waiting
async def test_the_loop_s_step_runs_when_it_is_due_and_not_at_all_after_the_end(
    batch, server, group, stop
):
    async def train(work):
        return work()

    step = gated(batch, train)
    group.others = 3 * MICROBATCH
    assert await step(lambda: 0.5) == 0.5
    stop()
    assert await step(lambda: 0.7) is None


@waiting
async def test_a_step_that_is_due_waits_for_what_goes_before_it(batch, server, group, stop):
    done = []

    async def train(work):
        done.append("step")
        return work()

    async def before():
        await asyncio.sleep(0.1)
        done.append("before")
        batch.steps = 0 if len(done) == 1 else batch.steps
        return len(done) > 1

    step = gated(batch, train, before)
    group.others = 3 * MICROBATCH
    await step(lambda: 0.5)
    stop()
    await step(lambda: 0.7)
    assert done == ["before", "before", "step"], "it was put off once; none is made after the end"


@waiting
async def test_what_goes_before_a_step_is_done_at_once_where_the_work_is_to_be_given_up(
    batch, server, group, stop
):
    is_left_out, done = [], []
    batch.is_left_out = lambda: bool(is_left_out)

    async def before():
        is_left_out.clear()
        done.append(asyncio.get_running_loop().time())
        return False

    later(0.1, lambda: is_left_out.append(True))
    later(3.0, stop)
    assert await gated(batch, None, before)(lambda: 0.5) is None
    assert len(done) == 1
    assert done[0] <= 0.1 + LOOK_EVERY_S
    assert batch.steps == 0


@waiting
async def test_waiting_leaves_no_tasks_behind(batch, server, group, stop):
    later(3.1, stop)
    await until_full(batch, 4.0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# What a step is made of.


def training_task(summing, *batches, schedule=None):
    model = build(MODEL, 1)
    server = Merged()
    server.batches = list(batches)
    replica = PlainReplica(model, InnerConfig(lr=1.0).build(model), None)
    schedule = schedule or Schedule(1.0, 10**6, floor=1.0)
    return StageTask(server, Stage(model), replica, schedule, MICROBATCH, summing), model


def taken(model, value, microbatches, loss=None):
    gradients = {name: torch.full_like(x, value) for name, x in model.named_parameters()}
    return Taken(
        MicrobatchGradient(gradients if microbatches else {}, microbatches * MICROBATCH), loss
    )


def gradients_of(model):
    return {float(value) for x in model.parameters() for value in x.grad.unique()}


def test_where_gradients_are_exchanged_it_is_the_sum_over_microbatches_and_weighs_as_many():
    made, model = training_task(True)
    made.accounts.batches = [taken(model, 48.0, 3, loss=2.5), taken(model, 16.0, 1)]
    assert made.forward_backward(0, Progress(0)) == 2.5
    assert (made.tokens_per_step, made.weight) == (3 * MICROBATCH, 3.0)
    assert gradients_of(model) == {48.0 / MICROBATCH}
    made.forward_backward(1, Progress(1))
    assert made.weight == 1.0
    assert gradients_of(model) == {(48.0 + 16.0) / MICROBATCH}, "what was not exchanged yet stays"


def test_where_this_server_steps_itself_it_is_the_mean_over_tokens():
    made, model = training_task(False)
    made.accounts.batches = [taken(model, 48.0, 3)]
    made.forward_backward(0, Progress(0))
    assert (made.tokens_per_step, made.weight) == (3 * MICROBATCH, 1.0)
    assert gradients_of(model) == {48.0 / (3 * MICROBATCH)}


@pytest.mark.parametrize("summing", [True, False])
def test_a_step_of_nothing_leaves_a_gradient_of_zeros(summing):
    made, model = training_task(summing)
    made.accounts.batches = [taken(model, 0.0, 0)]
    assert math.isnan(made.forward_backward(0, Progress(0)))
    assert gradients_of(model) == {0.0}
    assert (made.tokens_per_step, made.weight) == (0, 0.0 if summing else 1.0)


def test_a_loss_that_is_not_known_is_the_last_one_that_was():
    made, model = training_task(True)
    made.accounts.batches = [
        taken(model, 1.0, 1, loss=2.0),
        taken(model, 0.0, 0),
        taken(model, 1.0, 1, loss=1.0),
    ]
    assert [made.forward_backward(step, Progress(step)) for step in range(3)] == [2.0, 2.0, 1.0]


def test_the_rate_is_the_schedule_s_and_a_round_s_step_is_alike_for_newcomers():
    schedule = Schedule(1.0, 1000, warmup_tokens=100, joiner_steps=10)
    made, model = training_task(True, schedule=schedule)
    made.accounts.batches = [taken(model, 1.0, 1)]
    made.joined_at = 5
    made.forward_backward(6, Progress(6, tokens=500))
    assert made.replica.lr == schedule.rate(500, 1)
    made.set_rate(500)
    assert made.replica.lr == schedule.rate(500, 10**6) > schedule.rate(500, 1)


def test_what_is_given_up_leaves_the_sum_and_its_weight():
    made, model = training_task(summing=True)
    made.accounts.batches = [taken(model, 1.0, 3), replace(taken(model, 2.0, 1), discarded=3)]
    weight = tokens = 0.0
    for step in range(2):
        made.forward_backward(step, Progress(step, 0))
        weight, tokens = weight + made.weight, tokens + made.tokens_per_step
    assert (weight, tokens) == (1.0, MICROBATCH)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2 / MICROBATCH))
