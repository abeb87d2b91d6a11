"""The law of `Replica` on the plain one, and what only it has."""

import inspect

import pytest
import torch
from worlds import node_replica_law as law

from farflock.node.model.replica import PlainReplica, blend
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.small_adamw import SmallAdamW


@pytest.mark.parametrize("rule", law.LAW, ids=lambda rule: rule.__name__)
def test_law(rule):
    rule(law.Subject())


@pytest.mark.parametrize("rule", law.SGD_LAW, ids=lambda rule: rule.__name__)
def test_law_under_sgd(rule):
    rule(law.Subject("sgd"))


class Packed(law.Subject):
    """A subject whose moments all take one byte a value; bare loops have them in float32."""

    def close(self, a, b):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0.1, atol=0.01)

    def replica_of(self):
        groups = self.optimizer.param_groups
        self.optimizer = SmallAdamW(groups, law.LR, (0.9, 0.95), 1e-8, "int8", smallest=0)
        return super().replica_of()


ROUNDED = {  # these write any numbers, and packed moments are rounded
    law.what_was_written_is_read,
    law.a_mix_is_two_products_and_a_sum_each_rounded_by_itself,
}


@pytest.mark.parametrize(
    "rule", [rule for rule in law.LAW if rule not in ROUNDED], ids=lambda rule: rule.__name__
)
def test_law_with_packed_moments(rule):
    rule(Packed())


def test_every_rule_of_the_law_is_in_its_list():
    rules = {
        name
        for name, value in vars(law).items()
        if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["world"]
    }
    assert rules == {rule.__name__ for rule in (*law.LAW, *law.SGD_LAW)}


def test_momentum_of_sgd_is_a_moment_like_any_other():
    module = torch.nn.Linear(2, 2)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), None)
    buffers = {name: torch.full(shape, 2.0) for name, shape in replica.shapes.items()}
    replica.write(buffers, "momentum_buffer")
    before = replica.read(replica.names, "param")
    replica.write({name: torch.zeros(shape) for name, shape in replica.shapes.items()}, "grad")
    replica.inner_step()
    for name, x in replica.read(replica.names, "param").items():
        torch.testing.assert_close(x, before[name] - 0.1 * 0.9 * 2.0)


# Moments: which inner optimizer has which, of a matrix and of a vector


def linear(name, **options):
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    return PlainReplica(
        module, InnerConfig(name, lr=0.1, weight_decay=0.0, **options).build(module), None
    )


def all_equal(replica, value):
    return {name: torch.full(shape, value) for name, shape in replica.shapes.items()}


def stepped(replica, gradient=1.0):
    replica.write(all_equal(replica, gradient), "grad")
    replica.inner_step()
    return replica


ADAM = ("exp_avg", "exp_avg_sq")
HELD = [  # the moments of the matrix, and of the vector
    ("adamw", {}, ADAM, ADAM),
    ("sgd", {}, (), ()),
    ("sgd", {"momentum": 0.9}, ("momentum_buffer",), ("momentum_buffer",)),
    ("sgd", {"momentum": 0.9, "nesterov": True}, ("momentum_buffer",), ("momentum_buffer",)),
    ("muon", {}, ("momentum_buffer",), ADAM),
    ("nadam", {}, ADAM, ADAM),
]
each_inner = pytest.mark.parametrize(("name", "options", "matrix", "vector"), HELD)


@each_inner
@pytest.mark.parametrize("steps", [0, 1])
def test_a_moment_that_the_inner_optimizer_has_is_written_also_before_its_first_step(
    name, options, matrix, vector, steps
):
    for what in (*ADAM, "momentum_buffer"):
        for parameter, held in (("weight", matrix), ("bias", vector)):
            replica = linear(name, **options)
            for _ in range(steps):
                stepped(replica)
            before = replica.read([parameter], what)[parameter]
            assert bool(before.any()) == (steps > 0 and what in held)
            new = {parameter: torch.full_like(before, 0.75)}
            if what in held:
                replica.write(new, what, 0.25)
                assert torch.equal(
                    replica.read([parameter], what)[parameter], before * 0.75 + 0.75 * 0.25
                )
            else:
                with pytest.raises(ValueError, match=f"keeps no {what} for {parameter}"):
                    replica.write(new, what)


@each_inner
def test_reading_and_writing_zeros_before_the_first_step_changes_no_step(
    name, options, matrix, vector
):
    fresh, touched = linear(name, **options), linear(name, **options)
    for what in (*ADAM, "momentum_buffer", "step", "mu_product"):
        touched.write(touched.read(touched.names, what), what)
    for _ in range(2):
        stepped(fresh), stepped(touched)
    for parameter, x in fresh.read(fresh.names, "param").items():
        assert torch.equal(touched.read([parameter], "param")[parameter], x)


@each_inner
def test_all_moments_and_step_counts_of_another_replica_give_its_future(
    name, options, matrix, vector
):
    teacher, joiner = linear(name, **options), linear(name, **options)
    for gradient in (1.0, -0.5, 0.25):
        stepped(teacher, gradient)
    for what in ("param", *ADAM, "momentum_buffer", "step", "mu_product"):
        joiner.write(teacher.read(teacher.names, what), what)
    for replica in (teacher, joiner):
        stepped(stepped(replica, 0.3), -2.0)
    for what in ("param", *ADAM, "momentum_buffer", "step", "mu_product"):
        for parameter, x in teacher.read(teacher.names, what).items():
            assert torch.equal(joiner.read([parameter], what)[parameter], x), what


@pytest.mark.parametrize("written", [0, 3, 1000])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_step_count_that_was_written_is_the_one_that_corrects_the_bias(written, steps):
    """AdamW: lr·(m/(1 - b1^t)) / (sqrt(v/(1 - b2^t)) + eps) with t one above what was written."""
    replica = linear("adamw")
    for _ in range(steps):
        stepped(replica)
    replica.write(all_equal(replica, 0.4), "exp_avg")
    replica.write(all_equal(replica, 0.01), "exp_avg_sq")
    replica.write({name: torch.tensor(float(written)) for name in replica.names}, "step")
    before = replica.read(replica.names, "param")
    stepped(replica, 2.0)
    t, m, v = written + 1, 0.9 * 0.4 + 0.1 * 2, 0.95 * 0.01 + 0.05 * 4
    moved = 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8)
    for name, x in replica.read(replica.names, "param").items():
        torch.testing.assert_close(
            before[name] - x, torch.full(x.shape, moved), rtol=1e-5, atol=1e-6
        )
        assert float(replica.read([name], "step")[name]) == t


def test_a_mix_of_step_counts_is_a_mix_of_numbers():
    replica = stepped(stepped(linear("adamw")))
    replica.write({name: torch.tensor(6.0) for name in replica.names}, "step", 0.5)
    assert {float(x) for x in replica.read(replica.names, "step").values()} == {4.0}


def test_a_moment_that_an_optimizer_has_not_made_yet_is_made_although_others_are_there():
    """SGD's state may name a momentum that is None, as older checkpoints do."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[module.weight] = {"momentum_buffer": None}
    replica = PlainReplica(module, optimizer, None)
    replica.write({"weight": torch.ones(2, 2)}, "momentum_buffer")
    assert replica.read(["weight"], "momentum_buffer")["weight"].tolist() == [
        [1.0, 1.0],
        [1.0, 1.0],
    ]


def test_a_clip_norm_of_none_leaves_gradients_as_they_are():
    module = torch.nn.Linear(1, 1, bias=False)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0), None)
    before = float(module.weight.detach())
    replica.write({"weight": torch.tensor([[1000.0]])}, "grad")
    replica.inner_step()
    assert float(module.weight.detach()) == pytest.approx(before - 1000)


def test_clipping_bounds_the_norm_over_all_parameters_together():
    module = torch.nn.Linear(1, 1)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0), 1.0)
    before = replica.read(replica.names, "param")
    replica.write({"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])}, "grad")
    replica.inner_step()
    moved = {
        name: float(before[name] - x) for name, x in replica.read(replica.names, "param").items()
    }
    assert moved == pytest.approx({"weight": 0.6, "bias": 0.8}, rel=1e-4)


def test_buffers_are_none_of_a_methods_business():
    module = torch.nn.BatchNorm1d(3)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    assert replica.names == ("weight", "bias")


def test_a_model_in_bf16_is_read_and_written_in_float32():
    module = torch.nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    replica.write({"weight": torch.tensor([[1.0, 2.0], [3.0, 1 / 3]])}, "param")
    read = replica.read(["weight"], "param")["weight"]
    assert read.dtype == torch.float32
    assert read[1, 1].item() == pytest.approx(1 / 3, rel=1 / 256)


def test_an_unused_parameter_is_not_stepped_until_it_gets_a_gradient():
    module = torch.nn.Linear(2, 2)
    replica = PlainReplica(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    before = replica.read(replica.names, "param")
    module(torch.ones(1, 2)).sum().backward()
    module.bias.grad = None
    replica.inner_step()
    after = replica.read(replica.names, "param")
    assert torch.equal(after["bias"], before["bias"])
    assert not torch.equal(after["weight"], before["weight"])


def test_blend_of_one_copies_even_over_values_that_are_not_numbers():
    target = torch.tensor([float("nan"), float("inf")])
    blend(target, torch.tensor([1.0, 2.0]), 1.0)
    assert target.tolist() == [1.0, 2.0]


# Moments of fewer bytes


@pytest.fixture(params=["bf16", "int8"])
def small(request):
    """Return a replica of a matrix of 300 x 400 that has taken a step, and one that has not."""

    def made():
        module = torch.nn.Linear(400, 300)
        torch.nn.init.constant_(module.weight, 0.5)
        return PlainReplica(module, InnerConfig().build(module, moments=request.param), None)

    stepped = made()
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        x = torch.randn(300, 400, generator=generator)
        stepped.write({"weight": x, "bias": x[:, 0]}, "grad")
        stepped.inner_step()
    return stepped, made()


def test_small_moments_read_and_written_elsewhere_are_the_same(small):
    teacher, joiner = small
    for what in (*ADAM, "step", "param"):
        joiner.write(teacher.read(teacher.names, what), what)
        there = joiner.read(joiner.names, what)
        for name, x in teacher.read(teacher.names, what).items():
            assert x.dtype == torch.float32
            assert torch.equal(there[name], x), (name, what)
    for replica in small:
        replica.write({name: torch.ones(s) for name, s in replica.shapes.items()}, "grad")
        replica.inner_step()
    for name, x in teacher.read(teacher.names, "param").items():
        assert torch.equal(joiner.read([name], "param")[name], x)


def test_small_moments_are_read_and_changed_in_blocks(small):
    replica, _ = small
    for what in ADAM:
        whole = replica.read(["weight"], what)["weight"].reshape(-1)
        for start, stop in ((0, 65_536), (65_536, 120_000), (7, 8)):
            assert torch.equal(replica.block("weight", what, start, stop), whole[start:stop])
        replica.update(["weight"], [what], lambda block, x: [x * 0.5])
        changed = replica.read(["weight"], what)["weight"].reshape(-1)
        torch.testing.assert_close(changed, whole * 0.5, rtol=1e-6, atol=0)
