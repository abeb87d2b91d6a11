"""Steps that are in no round are counted, said at the end, and on wish taken into a last round."""

import warnings

import pytest
import torch
from worlds import virtual_optimizer
from worlds.virtual_optimizer import model_of, train_together

from farflock.node.library.last_round import OwnSteps, finish
from farflock.optimizers.method import Result

torch.set_num_threads(1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    return lambda model: (model(x) - x.sum(1, keepdim=True)).square().mean()


def after(steps, method="diloco", count=2, *, is_outer=False, **options):
    """The weights, tokens and own steps of each peer after its steps and `finish`."""

    async def work(member):
        for step in range(steps(member.rank)):
            await member.step(loss_of(member.rank, step))
        before = member.own.alone
        member.inner.zero_grad()
        await finish(member.here, member.own, member.task, 5.0)
        driver = member.here.loop.driver
        outer = driver.method.eval_params(driver.replica)["weight"]
        weight = outer if is_outer else member.model.weight.detach().clone()
        return weight, before, member.own.alone, member.here.loop.driver.tokens

    return train_together(count, method, model_of, work, adamw, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("diloco", {"period": 50}),
        ("streaming", {"period": 8, "fragments": 1}),
        ("delayed", {"period": 20}),
        ("sparseloco", {"period": 50}),
    ],
)
def test_a_program_shorter_than_its_period_ends_with_a_round_of_all(method, options):
    delays = method in ("streaming", "delayed")
    (a, before, left, tokens), (b, *_) = after(lambda rank: 6, method, is_outer=delays, **options)
    assert torch.equal(a, b)
    assert (before, left) == (6, 0)
    assert tokens == 12


def test_peers_that_made_unequal_numbers_of_steps_end_equal_too():
    (a, *_), (b, *_), (c, *_) = after(lambda rank: 3 + 2 * rank, period=20, count=3)
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_it_changes_nothing_right_after_a_round():
    (a, before, _, _), (b, *_) = after(lambda rank: 6, period=3)
    (c, *_), _ = after(lambda rank: 6, "ddp")
    assert before == 0
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# what is said


def own_steps(made, shared, company=True):
    own = OwnSteps()
    own.stepped(made, 2 if company else 1)
    own.shared = shared
    return own


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (own_steps(60, 0), r"all 60 steps are in no round .* call optimizer.finish\(\)"),
        (own_steps(60, 50), "the last 10 of 60 steps are in no round"),
    ],
)
def test_steps_that_stay_this_program_s_own_are_said(own, says):
    with pytest.warns(UserWarning, match=says) as said:
        own.tell()
    assert "\n" not in str(said[0].message)


def test_a_peer_alone_and_one_without_own_steps_are_told_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own_steps(60, 0, company=False).tell()
        own_steps(60, 60).tell()
        model = model_of(0)
        with virtual_optimizer.alone(model, period=50) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(0, step)(model).backward()
                optimizer.step()
            optimizer.finish()
            assert optimizer.tokens == 3


def test_a_step_that_still_counts_as_one_token_is_said_once_after_a_round():
    own = own_steps(60, 50)
    with pytest.warns(UserWarning, match="counts as 1 token .* pass tokens_per_step"):
        own.tell_of_tokens(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.tell_of_tokens(1)
        own_steps(60, 50).tell_of_tokens(512)
        own_steps(60, 0).tell_of_tokens(1)


@pytest.mark.parametrize(
    ("result", "shared"),
    [
        (Result("ok", 1, ("a", "b"), taken={"weight": [(0, 8)]}), 4),
        (Result("ok", 1, ("a", "b")), 0),  # decided without this peer
        (Result("alone", 1, ("a",), taken={"weight": [(0, 8)]}), 0),
    ],
)
def test_a_round_counts_if_it_took_this_peer_s_work_and_another_s(result, shared):
    own = own_steps(5, 0)
    with pytest.raises(StopIteration):
        own.counted(result, 4).send(None)
    assert own.shared == shared
