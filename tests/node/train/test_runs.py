"""Runs of small shards have the bytes, values and refusals of their shards one by one."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression import floats
from farflock.compression.catalog import codec
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.node.train import shards
from farflock.node.train.shards import MAX_ABS, DecodedTensors, Reducer, ShardLayout

NAMES = ("fp32", "fp16", "bf16", "int8:4")  # the last cannot be joined
SHAPES = {"a": (7, 3), "empty": (0,), "b": (50,), "c": (), "d": (2, 9)}
each_codec = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=[0, 40, 150])
def cut(request, monkeypatch):
    """A layout of small shards: one segment each, a few, or many."""
    monkeypatch.setattr(shards, "SEGMENT_VALUES", 8)
    monkeypatch.setattr(shards, "SHARD_BYTES", request.param)
    monkeypatch.setattr(floats, "RUN_VALUES", 30)
    return lambda name, back=None: ShardLayout.of(SHAPES, codec(name), 1, back and codec(back))


def tensors(seed):
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def one_by_one(layout, values):
    return [layout.encode(index, 3, values) for index in range(len(layout.shards))]


def reducer(layout, back):
    return Reducer(layout, codec(back), compensate=False)


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_runs_cover_all_shards_once_and_are_as_long_as_may_be(counts):
    runs = floats.runs(counts)
    assert list(itertools.chain(*runs)) == list(range(len(counts)))
    values = [sum(counts[run.start : run.stop]) for run in runs]
    for run, count in zip(runs, values, strict=True):
        assert count <= floats.RUN_VALUES or counts[run.start] > floats.RUN_VALUES
    for run, count in zip(runs[1:], values, strict=False):
        assert count + counts[run.start] > floats.RUN_VALUES


@each_codec
def test_a_run_has_the_payloads_of_its_shards(cut, name):
    layout, values = cut(name), tensors(1)
    made = [layout.encode_run(run, 3, values) for run in layout.runs]
    assert list(itertools.chain(*made)) == one_by_one(layout, values)


def test_small_shards_of_floats_are_joined_and_others_are_not(cut):
    assert any(map(cut("bf16").joins, cut("bf16").runs))
    assert not any(map(cut("int8:4").joins, cut("int8:4").runs))
    assert not any(map(cut("bf16+zstd").joins, cut("bf16+zstd").runs))


def test_long_shards_are_coded_segment_by_segment():
    layout = ShardLayout.of({"x": (floats.RUN_VALUES,), "y": (2,)}, codec("fp16"))
    assert len(layout.shards[0]) == 2
    assert not any(map(layout.joins, layout.runs))


@each_codec
def test_tensors_are_read_in_any_ranges(cut, name):
    layout, values = cut(name), tensors(1)
    payloads = one_by_one(layout, values)
    expected = {
        tensor: torch.cat(
            [
                values
                for index, shard in enumerate(layout.shards)
                for segment, values in zip(
                    shard, layout.decode(index, 3, payloads[index]), strict=True
                )
                if segment.tensor == tensor
            ]
        )
        for tensor in SHAPES
    }
    decoded = DecodedTensors(layout, 3, payloads, SHAPES)
    for start, stop in itertools.combinations(range(51), 2):
        assert torch.equal(decoded.read("b", start, stop), expected["b"][start:stop])
    for tensor, shape in SHAPES.items():
        assert torch.equal(decoded[tensor], expected[tensor].view(shape))


@each_codec
@pytest.mark.parametrize("back", NAMES)
def test_a_run_is_reduced_to_the_bits_of_its_shards(cut, name, back):
    layout = cut(name, back)
    contributions = [one_by_one(layout, tensors(seed)) for seed in range(3)]
    inputs = list(zip("cab", (1.0, 2.5, 0.3), contributions, strict=True))
    made = reducer(layout, back)
    for run in layout.runs:
        reductions = made.reduce_run(
            3, run, [(peer, weight, sent[run.start : run.stop]) for peer, weight, sent in inputs]
        )
        assert reductions == [
            made.reduce(3, index, [(peer, weight, sent[index]) for peer, weight, sent in inputs])
            for index in run
        ]
        assert all(reduction.data for reduction in reductions)


BAD = {
    "short": lambda payload: payload[:-1],
    "long": lambda payload: payload + b"x",
    "a wrong length inside": lambda payload: b"\1" + payload[1:],
    "NaN": lambda payload: payload[:-2] + b"\xff\x7f",
    "too large": lambda payload: payload[:-2] + b"\x7f\x7f",  # in bf16
    "empty": lambda payload: b"",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_corrupt_shard_of_a_run_is_refused_and_its_sender_named(cut, bad):
    layout = cut("bf16")
    good, other = (one_by_one(layout, tensors(seed)) for seed in range(2))
    run = next(run for run in layout.runs if len(layout.shards[run.start]) and layout.joins(run))
    place = run.stop - 1 - run.start
    sent = good[run.start : run.stop]
    layout.require_valid_run(run, 3, sent)
    sent[place] = BAD[bad](sent[place])
    with pytest.raises(CorruptPayload):
        layout.require_valid_run(run, 3, sent)
    reductions = reducer(layout, "bf16").reduce_run(
        3, run, [("liar", 1.0, sent), ("peer", 1.0, other[run.start : run.stop])]
    )
    assert [reduction.rejected for reduction in reductions] == [()] * place + [("liar",)]


@given(data=st.data())
@settings(max_examples=200)
def test_arbitrary_bytes_are_refused_as_shard_by_shard(data):
    layout = ShardLayout.of({"x": (2,), "y": (1,), "z": (1,)}, codec("bf16"))
    payloads = data.draw(
        st.lists(st.binary(max_size=30), min_size=1, max_size=1)
        | st.just([b"\4\0\0\0abcd\2\0\0\0ab\2\0\0\0xy"])
    )
    run = range(1)
    assert layout.joins(run)
    values = torch.empty(layout.count(run))
    valid = layout.decode_run(run, 0, payloads, values)
    assert valid is layout.is_valid(0, 0, payloads[0])
    assert not valid or float(values.abs().max()) <= MAX_ABS


def test_a_run_that_is_not_finite_is_not_encoded(cut):
    layout, values = cut("bf16"), tensors(1)
    values["d"][1, 2] = float("nan")
    with pytest.raises(UnencodableTensor):
        for run in layout.runs:
            layout.encode_run(run, 0, values)


def test_weights_that_are_nothing_in_float32_make_no_mean_of_a_run(cut):
    layout = cut("fp32")
    payloads = one_by_one(layout, tensors(1))
    for run in layout.runs:
        inputs = [("a", 1e-40, payloads[run.start : run.stop])]
        for reduction in reducer(layout, "fp32").reduce_run(0, run, inputs):
            assert reduction.data is None
