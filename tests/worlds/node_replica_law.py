"""The law of `Replica` (optimizers/method.py) as functions.

The plain replica runs them in the test's own process, the sharded one in two others (see
tests/node/model/sharded_worker.py). Each takes a `Subject`, whose `backward` and `loss` are
collective there.
"""

import torch
from torch import nn

from farflock.node.model.replica import PlainReplica
from farflock.optimizers.parts.inner import InnerConfig

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
CLIP = 0.5
LR = 0.05


class Net(nn.Module):
    """A module that is hard to shard: tied embeddings, an odd number of rows, a norm, and a
    parameter of one value."""

    def __init__(self):
        super().__init__()
        self.embed, self.inside, self.norm = nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5)
        self.outside, self.head = nn.Linear(5, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, tokens):
        return self.head(
            self.outside(torch.tanh(self.norm(self.inside(self.embed(tokens))))) * self.gain
        )


def batch(seed, part=0, parts=1):
    """Part of a batch of eight rows of six tokens, and the tokens that follow them."""
    tokens = torch.randint(0, 7, (8, 7), generator=torch.Generator().manual_seed(seed))
    rows = tokens[part * 8 // parts : (part + 1) * 8 // parts]
    return rows[:, :-1], rows[:, 1:]


def loss_of(module, seed, part=0, parts=1):
    x, y = batch(seed, part, parts)
    return nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())


class Subject:
    """A module under a replica. `exact`: its numbers equal a bare PyTorch loop's to the bit."""

    exact = True

    def __init__(self, inner="adamw"):
        self.inner = inner
        self.module = self.shard(Net())
        self.optimizer = InnerConfig(inner, lr=LR).build(self.module)
        self.replica = self.replica_of()

    def shard(self, module):
        return module

    def replica_of(self):
        return PlainReplica(self.module, self.optimizer, CLIP)

    def backward(self, seed):
        loss_of(self.module, seed).backward()

    def loss(self, seed):
        with torch.no_grad():
            return float(loss_of(self.module, seed))

    def train(self, *seeds):
        for seed in seeds:
            self.backward(seed)
            self.replica.inner_step()

    def all(self, what="param"):
        return self.replica.read(self.replica.names, what)

    def close(self, a, b):
        tolerance = {"rtol": 0, "atol": 0} if self.exact else {"rtol": 1e-5, "atol": 1e-6}
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], **tolerance)


def bare(*seeds, inner="adamw", lr=LR):
    """Module and optimizer after a bare PyTorch loop over these batches."""
    module = Net()
    optimizer = InnerConfig(inner, lr=lr).build(module)
    for seed in seeds:
        loss_of(module, seed).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def parameters_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(call, word):
    try:
        call()
    except ValueError as error:
        assert word in str(error), str(error)
    else:
        raise AssertionError(f"nothing was refused where {word!r} was to be named")


# the law


def names_and_shapes_are_the_modules_and_a_tied_parameter_is_there_once(world):
    plain = parameters_of(Net())
    assert world.replica.names == tuple(plain)
    assert "head.weight" not in world.replica.names
    assert dict(world.replica.shapes) == {name: tuple(p.shape) for name, p in plain.items()}


def what_was_never_there_yet_reads_as_zeros(world):
    for what in ("grad", *MOMENTS):
        read = world.all(what)
        assert tuple(read) == world.replica.names
        assert not any(bool(x.any()) for x in read.values())
    assert all(x.shape == () for x in world.all("step").values())


def read_gives_full_float32_copies_on_the_cpu_that_later_steps_do_not_change(world):
    world.train(1)
    world.backward(2)
    for what in ("param", "grad", *MOMENTS):
        read = world.all(what)
        kept = {name: x.clone() for name, x in read.items()}
        for name, x in read.items():
            assert x.dtype == torch.float32
            assert x.device.type == "cpu"
            assert what == "step" or tuple(x.shape) == world.replica.shapes[name]
        assert any(bool(x.any()) for x in read.values())
        world.replica.inner_step()
        world.backward(3)
        assert same(read, kept)


def changing_what_was_read_changes_nothing(world):
    for x in world.all().values():
        x.zero_()
    world.close(world.all(), parameters_of(Net()))


def writing_what_was_read_changes_nothing(world):
    world.train(1, 2)
    world.backward(3)
    for what in ("param", "grad", *MOMENTS):
        before = world.all(what)
        world.replica.write(before, what)
        assert same(world.all(what), before)
    world.replica.inner_step()
    world.close(world.all(), parameters_of(bare(1, 2, 3)[0]))


def writing_back_moments_that_were_never_there_leaves_a_fresh_start(world):
    for what in MOMENTS[:1]:
        world.replica.write(world.all(what), what)
    world.train(1, 2)
    world.close(world.all(), parameters_of(bare(1, 2)[0]))


def what_was_written_is_read(world):
    for what in ("param", "grad", "exp_avg", "exp_avg_sq"):
        new = {name: torch.full(shape, 0.37) for name, shape in world.replica.shapes.items()}
        world.replica.write(new, what)
        assert same(world.all(what), new)
    world.replica.write({name: torch.tensor(5.0) for name in world.replica.names}, "step")
    assert {float(x) for x in world.all("step").values()} == {5.0}


def only_the_named_tensors_are_read_and_written(world):
    before = world.all()
    world.replica.write({"norm.bias": torch.full((5,), 9.0)}, "param")
    read = world.replica.read(["norm.bias", "gain"], "param")
    assert list(read) == ["norm.bias", "gain"]
    assert read["norm.bias"].tolist() == [9.0] * 5
    assert same({**world.all(), "norm.bias": before["norm.bias"]}, before)


def a_mix_is_two_products_and_a_sum_each_rounded_by_itself(world):
    world.train(1)
    for what in ("param", "exp_avg", "exp_avg_sq"):
        for mix in (0.3, 0.0, 1.0):
            before = world.all(what)
            new = {name: torch.cos(x) for name, x in before.items()}
            world.replica.write(new, what, mix)
            expected = {
                name: before[name] * torch.tensor(1 - mix) + new[name] * torch.tensor(mix)
                for name in before
            }
            assert same(world.all(what), expected)


def an_inner_step_leaves_gradients_zeroed(world):
    world.backward(1)
    assert any(bool(x.any()) for x in world.all("grad").values())
    world.replica.inner_step()
    assert not any(bool(x.any()) for x in world.all("grad").values())


def gradients_add_up_until_the_step(world):
    world.backward(1)
    first = world.all("grad")
    world.backward(1)
    twice = world.all("grad")
    for name, x in first.items():
        torch.testing.assert_close(twice[name], 2 * x, rtol=1e-5, atol=1e-6)


def training_is_that_of_a_bare_loop_with_clipping(world):
    world.train(1, 2, 3, 4, 5)
    module, optimizer = bare(1, 2, 3, 4, 5)
    world.close(world.all(), parameters_of(module))
    for what in MOMENTS:
        expected = {name: optimizer.state[p][what].clone() for name, p in module.named_parameters()}
        world.close(world.all(what), expected)


def the_rate_is_the_attribute_unless_one_is_given(world):
    world.replica.lr = 0.01
    world.train(1)
    world.close(world.all(), parameters_of(bare(1, lr=0.01)[0]))
    before = world.all()
    world.backward(2)
    world.replica.inner_step(lr=0.0)
    assert same(world.all(), before)


def the_model_computes_with_what_was_written_also_after_an_evaluation(world):
    before = world.loss(1)
    other = {name: x / 2 + 0.1 for name, x in world.all().items()}
    world.replica.write(other, "param")
    plain = Net()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(other[name])
        expected = float(loss_of(plain, 1))
    assert abs(world.loss(1) - expected) < 1e-5
    assert abs(before - expected) > 1e-2
    world.train(2)
    loss_of(plain, 2).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    InnerConfig("adamw", lr=LR).build(plain).step()
    world.close(world.all(), parameters_of(plain))


def another_shape_is_refused_and_nothing_is_written(world):
    world.train(1)
    for what in ("param", "grad", "exp_avg"):
        before = world.all(what)
        refused(
            lambda what=what: world.replica.write({"norm.bias": torch.ones(())}, what),
            "(5,), got ()",
        )
        refused(
            lambda what=what: world.replica.write({"inside.weight": torch.ones(4, 5)}, what),
            "(5, 4), got (4, 5)",
        )
        assert same(world.all(what), before)


def moments_move_from_one_replica_to_another(world):
    """Join as under DDP: write all of a trained replica's state into a fresh one."""
    module, optimizer = bare(1, 2, 3)
    world.replica.write(parameters_of(module), "param")
    for what in MOMENTS:
        stored = {name: optimizer.state[p][what].clone() for name, p in module.named_parameters()}
        world.replica.write(stored, what)
    world.train(4)
    world.close(world.all(), parameters_of(bare(1, 2, 3, 4)[0]))


def blocks_are_ranges_of_what_is_read_now(world):
    for seed in (1, 2):
        world.train(seed)
        world.backward(seed + 10)
        for what in ("param", "grad", "exp_avg"):
            for name, x in world.all(what).items():
                half = x.numel() // 2
                for start, stop in ((0, half), (half, x.numel())):
                    block = world.replica.block(name, what, start, stop)
                    assert block.dtype == torch.float32
                    assert torch.equal(block, x.reshape(-1)[start:stop])
        world.replica.inner_step()


def an_update_sets_what_it_returns_and_leaves_the_rest(world):
    before, seen = world.all(), []

    def change(block, x):
        seen.append((block.name, block.start, block.stop))
        return (x * 2 if block.name != "inside.bias" else None,)

    names = ("gain", "inside.weight", "inside.bias")
    world.replica.update(names, ("param",), change)
    assert seen == [("gain", 0, 1), ("inside.weight", 0, 20), ("inside.bias", 0, 5)]
    doubled = {name: x * 2 if name in names[:2] else x for name, x in before.items()}
    assert same(world.all(), doubled)


def an_update_sees_several_kinds_of_a_block_at_once(world):
    world.train(1)
    before, mean = world.all(), world.all("exp_avg")
    world.replica.update(world.replica.names, ("param", "exp_avg"), lambda block, x, m: (m, None))
    assert same(world.all(), mean)
    world.replica.update(world.replica.names, ("exp_avg", "param"), lambda block, m, x: (-m, None))
    assert same(world.all("exp_avg"), {name: -m for name, m in mean.items()})
    world.replica.write(before, "param")


def a_methods_state_is_allocated_as_zeros(world):
    x = world.replica.allocate((2, 3))
    assert x.shape == (2, 3)
    assert x.dtype == torch.float32
    assert not x.any()


LAW = (
    names_and_shapes_are_the_modules_and_a_tied_parameter_is_there_once,
    what_was_never_there_yet_reads_as_zeros,
    read_gives_full_float32_copies_on_the_cpu_that_later_steps_do_not_change,
    changing_what_was_read_changes_nothing,
    writing_what_was_read_changes_nothing,
    writing_back_moments_that_were_never_there_leaves_a_fresh_start,
    what_was_written_is_read,
    only_the_named_tensors_are_read_and_written,
    a_mix_is_two_products_and_a_sum_each_rounded_by_itself,
    an_inner_step_leaves_gradients_zeroed,
    gradients_add_up_until_the_step,
    training_is_that_of_a_bare_loop_with_clipping,
    the_rate_is_the_attribute_unless_one_is_given,
    the_model_computes_with_what_was_written_also_after_an_evaluation,
    another_shape_is_refused_and_nothing_is_written,
    moments_move_from_one_replica_to_another,
    blocks_are_ranges_of_what_is_read_now,
    an_update_sets_what_it_returns_and_leaves_the_rest,
    an_update_sees_several_kinds_of_a_block_at_once,
    a_methods_state_is_allocated_as_zeros,
)


def under_plain_sgd_there_are_no_adam_moments(world):
    zeros = world.all("exp_avg")
    world.replica.write(zeros, "exp_avg")
    ones = {"gain": torch.ones(1)}
    refused(lambda: world.replica.write(ones, "exp_avg"), "keeps no exp_avg for gain")
    world.train(1, 2)
    world.close(world.all(), parameters_of(bare(1, 2, inner="sgd")[0]))
    assert not any(bool(x.any()) for x in world.all("exp_avg").values())


SGD_LAW = (under_plain_sgd_there_are_no_adam_moments,)
