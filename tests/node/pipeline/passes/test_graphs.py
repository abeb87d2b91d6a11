"""Kept graphs: gradients have the bits of a pass computed again, whatever happens in between."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from farflock.node.model.llama import PRESETS, build
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.contrib.stash import Stash
from farflock.node.pipeline.passes.graphs import KeptGraphs, measured, within_memory
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.run.split import even
from farflock.node.train.task import NoRoom

CONFIG = msgspec.structs.replace(PRESETS["tiny"], layers=4, tied=False, vocab_size=50)
SPANS = even(CONFIG, 3)
BATCH, LENGTH = 2, 6
KEEPS = 3  # graphs that have room


def stage_of(index):
    return Stage(build(CONFIG, 7, SPANS[index]))


def inside(stage, number):
    chance = torch.Generator().manual_seed(number)
    if stage.is_first:
        return torch.randint(0, CONFIG.vocab_size, (BATCH, LENGTH), generator=chance)
    return torch.randn(BATCH, LENGTH, CONFIG.dim, generator=chance)


def outside(number):
    chance = torch.Generator().manual_seed(1000 + number)
    return torch.randn(BATCH, LENGTH, CONFIG.dim, generator=chance)


def graphs_of(stage):
    """Graphs of a stage, with room for `KEEPS`, that have measured the size of one."""
    _, size = measured(stage, inside(stage, 0))
    graphs = KeptGraphs(stage, KEEPS * size)
    graphs.forward("measured", inside(stage, 0))
    return graphs


def assert_same(stage, one, other):
    assert one.staged.tokens == other.staged.tokens
    for name, x in one.staged.gradients.items():
        assert torch.equal(x, other.staged.gradients[name]), name
    assert stage.is_first or torch.equal(one.input_gradient, other.input_gradient)


@pytest.mark.parametrize("index", [0, 1])
def test_outputs_and_gradients_have_the_bits_of_passes_without_a_graph(index):
    stage = stage_of(index)
    graphs = graphs_of(stage)
    for number in range(KEEPS):
        x = inside(stage, number)
        assert torch.equal(graphs.forward(number, x), stage.forward(x))
    for number in reversed(range(KEEPS)):
        x = inside(stage, number)
        graph = graphs.take(number, x)
        expected = stage.backward(x, outside(number))
        assert_same(stage, stage.gradients(graph, outside(number)), expected)
    assert graphs.used == KEEPS
    assert not graphs.size_bytes


@given(steps=st.lists(st.tuples(st.sampled_from("FBWS"), st.integers(0, 4)), max_size=24))
@settings(max_examples=40, deadline=None)
def test_no_order_of_passes_and_of_changes_of_the_weights_changes_a_bit(steps):
    stage, stash = stage_of(1), None
    graphs, stash = graphs_of(stage), Stash(stage.model)
    stash.serve({name: x.detach() + 0.5 for name, x in stage.model.named_parameters()})
    with torch.no_grad():
        for step, number in steps:
            x = inside(stage, number)
            if step == "F":
                graphs.forward(number, x)
            elif step == "B":
                assert_backward(stage, graphs, number)
            elif step == "W":
                next(stage.model.parameters()).add_(0.01)
            else:
                with stash.version(0):
                    assert_backward(stage, graphs, number)
            assert graphs.size_bytes <= graphs.max_bytes


def assert_backward(stage, graphs, number):
    x = inside(stage, number)
    graph = graphs.take(number, x) or stage.graph(x)
    assert_same(stage, stage.gradients(graph, outside(number)), stage.backward(x, outside(number)))


CHANGES = {
    "an inner step": lambda replica: replica.inner_step(0.1),
    "a method's write": lambda replica: replica.write(
        replica.read(replica.names, "param"), "param"
    ),
    "a method's update": lambda replica: replica.update(
        replica.names, ["param"], lambda block, x: (x.clone(),)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_write_to_the_weights_ends_the_graphs(change):
    stage = stage_of(1)
    graphs, x = graphs_of(stage), inside(stage, 1)
    inner = torch.optim.AdamW(stage.model.parameters())
    replica = PlainReplica(stage.model, inner)
    for number in range(2):
        for parameter in stage.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        graphs.forward(number, x)
        change(replica)
    assert graphs.take(1, x) is None
    graphs.forward(2, x)
    assert len(graphs) == 1, "the others are of no use any longer"


def test_a_graph_is_of_one_input_and_of_one_version_of_the_weights():
    stage = stage_of(1)
    graphs, x = graphs_of(stage), inside(stage, 1)
    x[0, 0, 0] = 0.0
    other = x.clone()
    other[0, 0, 0] = -0.0
    for taken, version in ((other, None), (x[:1], None), (x.double(), None), (x, "old")):
        graphs.forward(1, x)
        assert graphs.take(1, taken, version) is None
        assert graphs.take(1, x) is None, "it was taken out all the same"
    graphs.forward(1, x)
    assert graphs.take(2, x) is None
    assert graphs.take(1, x.clone()) is not None


def test_graphs_beyond_their_room_are_not_kept_and_a_repeated_pass_replaces_its_own():
    stage = stage_of(1)
    graphs, x = graphs_of(stage), inside(stage, 1)
    for number in range(KEEPS):
        assert graphs.forward(number, x) is not None
    assert graphs.forward(KEEPS, x) is None
    assert graphs.forward(0, inside(stage, 2)) is not None
    assert len(graphs) == KEEPS
    assert graphs.take(0, x) is None
    assert graphs.forward(KEEPS, x) is not None
    small = KeptGraphs(stage, 1)
    assert small.forward(0, x) is not None, "it is measured first"
    assert small.forward(0, x) is None


def test_the_size_of_a_graph_grows_with_the_microbatch_and_leaves_out_weights_and_input():
    stage = stage_of(1)
    x = inside(stage, 1)
    output, size = measured(stage, x)
    assert torch.equal(output, stage.forward(x))
    twice = measured(stage, torch.cat([x, x]))[1]
    assert twice == 2 * size
    layers = len(SPANS[1])
    # The values between two products that every layer must keep: the inputs of its projections.
    least = layers * (4 * CONFIG.dim + CONFIG.ffn_dim) * BATCH * LENGTH * 4
    assert least < size < 8 * least


def test_measuring_leaves_no_graph_behind(monkeypatch):
    stage, storages = stage_of(1), []
    x = inside(stage, 1)
    kept = (x, *stage.model.parameters(), *stage.model.buffers())
    known = {each.untyped_storage().data_ptr() for each in kept}

    def hooks(pack, unpack):
        def note(saved):
            if saved.untyped_storage().data_ptr() not in known:
                storages.append(StorageWeakRef(saved.untyped_storage()))
            return pack(saved)

        return real_hooks(note, unpack)

    real_hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", hooks)
    _, size = measured(stage, x)
    assert size
    assert storages
    assert all(each.expired() for each in storages)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ZeroDivisionError, RuntimeError])
def test_a_device_without_room_for_one_pass_is_named_and_other_errors_are_themselves(error):
    kept, tried = KeptGraphs(stage_of(1)), []

    def fail(least):
        tried.append(least)
        raise error("why")

    out_of_memory = error is torch.OutOfMemoryError
    with pytest.raises(NoRoom if out_of_memory else error, match="why"):
        within_memory([kept], fail)
    assert tried == ([False, True] if out_of_memory else [False])
