"""Old versions of a stage's weights: a late gradient is right at its own weights.

Memory is bounded.
"""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farflock.node.model.llama import PRESETS, build
from farflock.node.pipeline.contrib.stash import Stash, VersionAhead, VersionGone, swapped
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.run.terms import MAX_VERSIONS

TINY = PRESETS["tiny"]


class Weights(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), value))
        self.b = nn.Parameter(torch.full((2, 2), value))

    def fill(self, value):
        with torch.no_grad():
            self.a.fill_(value)
            self.b.fill_(value)

    @property
    def value(self):
        values = {x for p in self.parameters() for x in p.detach().flatten().tolist()}
        assert len(values) == 1, f"weights of several versions: {values}"
        return values.pop()


SIZE_BYTES = 7 * 4


def aged(keep, epochs):
    """A module whose weights in epoch e are e, after this many epochs, and its stash."""
    module = Weights(0.0)
    stash = Stash(module, keep)
    for epoch in range(1, epochs + 1):
        stash.leave()
        module.fill(float(epoch))
    return module, stash


def gradients(model, x, y):
    return Stage(model).backward(x, y).staged.gradients


def test_a_late_backward_pass_is_that_of_the_weights_which_the_forward_pass_used():
    model = build(TINY, 0)
    stash = Stash(model, keep=3)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    copies, versions = [], [0, 0, 0, 1, 2, 3]  # which a request of epoch 0, 1, ... names
    for epoch, named in enumerate(versions):
        x, y = torch.randint(0, 256, (2, 2, 9), generator=generator).unbind()
        copies.append(copy.deepcopy(model))
        with stash.version(named) as age:
            found = gradients(model, x, y)
        expected = gradients(copies[named], x, y)
        assert age == epoch - named
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        if age:
            newest = gradients(model, x, y)
            assert not any(torch.equal(newest[name], expected[name]) for name in expected), (
                "no difference to be seen"
            )
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        stash.leave()
        inner.step()


def test_both_passes_of_a_request_see_the_same_weights_although_steps_come_between():
    model = build(TINY, 0)
    stash = Stash(model)
    x = torch.arange(12).view(1, 12)
    before = Stage(model).forward(x)
    stash.leave()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with stash.version(0):
        assert torch.equal(Stage(model).forward(x), before)
    assert not torch.equal(Stage(model).forward(x), before)


def test_the_last_versions_are_kept_and_older_ones_are_stale():
    module, stash = aged(keep=3, epochs=10)
    assert stash.epochs == range(8, 11)
    for epoch in (8, 9, 10):
        with stash.version(epoch) as age:
            assert module.value == epoch
            assert age == 10 - epoch
    for epoch in (7, 0, -1, -(1 << 70)):
        with pytest.raises(VersionGone, match="those of 8 to 10 are here"), stash.version(epoch):
            pass


@pytest.mark.parametrize("epoch", [11, 1 << 63, 1 << 200])
def test_an_epoch_that_has_not_begun_is_told_apart_from_one_that_is_gone(epoch):
    _, stash = aged(keep=3, epochs=10)
    with pytest.raises(VersionAhead, match="the epoch is 10"):
        stash.delay(epoch)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_memory_is_bounded_however_long_it_goes_on(keep):
    _, stash = aged(keep, epochs=20)
    assert stash.size_bytes == (keep - 1) * SIZE_BYTES


def test_a_version_is_copied_once_into_the_room_of_the_one_that_goes():
    module, stash = aged(keep=3, epochs=3)
    rooms = set()
    for epoch in range(3, 12):
        with stash.version(epoch - 1):
            rooms.add(module.a.data_ptr())
        stash.leave()
        module.fill(float(epoch + 1))
    assert len(rooms) == 2


def test_looking_up_a_version_copies_nothing_and_leaves_the_modules_own_tensors_in_place():
    module, stash = aged(keep=2, epochs=1)
    own = [p.data_ptr() for p in module.parameters()]
    with stash.version(0):
        first = [p.data_ptr() for p in module.parameters()]
    with stash.version(0):
        assert [p.data_ptr() for p in module.parameters()] == first
    with stash.version(1):
        assert [p.data_ptr() for p in module.parameters()] == own
    assert [p.data_ptr() for p in module.parameters()] == own
    assert not set(own) & set(first)


def test_the_own_weights_come_back_after_a_failure():
    module, stash = aged(keep=2, epochs=4)
    with pytest.raises(ZeroDivisionError), stash.version(3):
        raise ZeroDivisionError
    assert module.value == 4
    with stash.version(3):
        assert module.value == 3


def test_what_was_served_is_what_a_late_backward_pass_finds():
    module, stash = aged(keep=2, epochs=1)
    stash.serve({name: torch.full_like(p, 1.5) for name, p in module.named_parameters()})
    with stash.version(1) as age:
        assert (module.value, age) == (1.5, 0)
    assert module.value == 1.0
    stash.leave()
    module.fill(2.0)
    with stash.version(1) as age:
        assert (module.value, age) == (1.5, 1)
    with stash.version(2):
        assert module.value == 2.0
    assert stash.size_bytes == SIZE_BYTES


def test_weights_that_do_not_fit_are_not_served():
    module, stash = aged(keep=2, epochs=1)
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match="without b"):
        stash.serve({"a": whole["a"]})
    with pytest.raises(ValueError, match="no parameter c"):
        stash.serve({**whole, "c": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"\(3,\), got"):
        stash.serve({**whole, "a": torch.zeros(4)})
    with pytest.raises(ValueError, match="float64"):
        stash.serve({**whole, "a": torch.zeros(3, dtype=torch.float64)})
    with stash.version(1):
        assert module.value == 1.0


def test_some_of_a_modules_tensors_can_be_swapped():
    module = Weights(1.0)
    with swapped(module, {"a": torch.full((3,), 5.0)}):
        assert (module.a.tolist(), module.b.tolist()) == ([5.0] * 3, [[1.0] * 2] * 2)
    assert module.value == 1.0


def test_nothing_changes_inside_the_block_of_a_version():
    _, stash = aged(keep=3, epochs=4)
    for forbidden in (
        stash.leave,
        lambda: stash.begin_anew(0),
        lambda: stash.version(4).__enter__(),
    ):
        with pytest.raises(AssertionError, match="inside the block"), stash.version(3):
            forbidden()
    assert stash.epochs == range(2, 5)


def test_adopted_weights_have_no_past():
    module, stash = aged(keep=3, epochs=4)
    module.fill(100.0)
    stash.begin_anew(100)
    assert (stash.epochs, stash.size_bytes) == (range(100, 101), 0)
    with pytest.raises(VersionGone):
        stash.delay(4)
    with stash.version(100):
        assert module.value == 100.0


@pytest.mark.parametrize("keep", [0, -1, MAX_VERSIONS + 1])
def test_a_stash_without_versions_or_without_bound_is_refused(keep):
    with pytest.raises(ValueError, match=f"stash of {keep}"):
        Stash(Weights(), keep)


ACTIONS = st.lists(
    st.one_of(
        st.just("leave"),
        st.just("serve"),
        st.tuples(st.just("adopt"), st.integers(0, 40)),
        st.integers(-2, 30),
    ),
    max_size=40,
)


@given(st.integers(1, 4), ACTIONS)
def test_it_is_a_dictionary_of_the_last_versions_whatever_happens(keep, actions):
    module = Weights(0.0)
    stash, model, now, fresh = Stash(module, keep), {0: 0.0}, 0, 0.0
    for action in actions:
        fresh += 1
        if action == "leave":
            stash.leave()
            module.fill(fresh)
            now += 1
            model[now] = fresh
            model.pop(now - keep, None)
        elif action == "serve":
            stash.serve({name: torch.full_like(p, fresh) for name, p in module.named_parameters()})
            model[now] = fresh
        elif isinstance(action, tuple):
            now = action[1]
            module.fill(fresh)
            stash.begin_anew(now)
            model = {now: fresh}
        elif action in model:
            with stash.version(action) as age:
                assert (module.value, age) == (model[action], now - action)
        else:
            with pytest.raises(VersionAhead if action > now else VersionGone):
                stash.delay(action)
        assert list(stash.epochs) == sorted(model)
        assert stash.size_bytes <= keep * SIZE_BYTES
