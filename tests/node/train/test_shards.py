"""Shards: the cut and the payloads, with hostile bytes and huge values."""

import gc
import itertools
import math
import struct
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor
from farflock.compression.elementwise import weighted_mean
from farflock.node.train.shards import (
    MANY_SHARDS,
    MAX_ABS,
    MIN_SHARD_BYTES,
    SEGMENT_VALUES,
    SHARD_BYTES,
    DecodedTensors,
    Segment,
    ShardLayout,
    decode_all,
)
from farflock.swarm.protocol.exchange.bundles import MAX_MEAN_BUNDLES

each_codec = pytest.mark.parametrize("name", [*CODECS, "int8:100", "topk:3/10"])
SHAPES = {"embed": (300, 2), "norm": (7,), "scalar": (), "empty": (0, 4), "head": (5, 3)}
some_shapes = st.dictionaries(
    st.text("abcdef.", min_size=1, max_size=8),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    min_size=1,
    max_size=5,
)
EXACT = ShardLayout.of({"x": (4,)}, codec("fp32"))


def tensors_of(shapes, seed=1):
    """Multiples of 1/64 in [-1, 1): the same on every machine."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        count = torch.Size(shape).numel()
        mixed = (torch.arange(count) + 7919 * number + 104_729 * seed) * 2_654_435_761 % 2**32 >> 16
        made[name] = ((mixed % 128 - 64).to(torch.float32) / 64).reshape(shape)
    return made


def packed(*values):
    """The payload of `EXACT`'s one shard."""
    return EXACT.pack(0, 0, [torch.tensor(values)])


def covers_once(cut, shapes):
    parts = [part for shard in cut.shards for part in shard]
    for name, shape in shapes.items():
        mine = [part for part in parts if part.tensor == name]
        assert mine[0].start == 0
        assert mine[-1].stop == torch.Size(shape).numel()
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
    assert [name for name, _ in itertools.groupby(part.tensor for part in parts)] == list(shapes)


# the cut


@each_codec
def test_the_cut_covers_every_value_once_in_order(name):
    shapes = {"big": (SEGMENT_VALUES * 2 + 5,), "small": (3,), "wide": (1000, 700), "none": (0,)}
    cut = ShardLayout.of(shapes, codec(name), back=codec("fp32"))
    covers_once(cut, shapes)
    assert all(sum(part.count for part in shard) <= SEGMENT_VALUES for shard in cut.shards)
    assert len(cut.shards) >= 5


@each_codec
@pytest.mark.parametrize("back", [None, "bf16"])
def test_a_shard_is_as_full_as_it_can_be(name, back):
    back = None if back is None else codec(back)
    cut = ShardLayout.of({"big": (3_000_000,), "b": (9,)}, codec(name), back=back)
    codecs = [codec(name)] if back is None else [codec(name), back]

    def most(parts):
        return sum(max(each.max_bytes(part.count) for each in codecs) for part in parts)

    whole = most(part for shard in cut.shards for part in shard)
    limit = SHARD_BYTES if back is None else max(whole // MANY_SHARDS, MIN_SHARD_BYTES)
    for shard, following in itertools.pairwise(cut.shards):
        assert most(shard) <= limit or len(shard) == 1
        assert most((*shard, following[0])) > limit


@pytest.mark.parametrize(("values", "shards"), [(10_000_000, 40), (30_000_000, 105)])
def test_the_shards_of_a_mean_are_many_enough_to_share_the_work_and_few_enough_for_no_list(
    values, shards
):
    shapes = {f"t{number}": (2_000_000,) for number in range(values // 2_000_000)}
    cut = ShardLayout.of(shapes, codec("fp16"), back=codec("bf16"))
    assert len(cut.shards) == shards <= MAX_MEAN_BUNDLES
    assert len(ShardLayout.of(shapes, codec("fp16")).shards) < len(cut.shards)


@each_codec
def test_tensors_are_cut_at_multiples_of_the_codecs_granule_only(name):
    shapes = {"big": (SEGMENT_VALUES * 3 + 1,)}
    granule = codec(name).granule(shapes["big"])
    starts = [part.start for shard in ShardLayout.of(shapes, codec(name)).shards for part in shard]
    assert len(starts) >= 4
    assert all(start % granule == 0 for start in starts)


def test_the_cut_is_a_function_of_names_shapes_and_codec():
    assert ShardLayout.of(SHAPES, codec("int8"), 3) == ShardLayout.of(
        dict(SHAPES), codec("int8"), 3
    )
    assert (
        ShardLayout.of({"a": (SEGMENT_VALUES + 1,)}, codec("int8:100")).shards
        != ShardLayout.of({"a": (SEGMENT_VALUES + 1,)}, codec("int8")).shards
    )


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3 * SEGMENT_VALUES), min_size=1, max_size=6),
    name=st.sampled_from([*CODECS, "int8:100", "topk:64/65536"]),
    back=st.sampled_from(["fp32", "bf16", None]),
)
def test_the_cut_is_that_of_the_page_on_the_wire_format(counts, name, back):
    """A second cutter, written from docs/wire-format.md alone."""
    shapes = {f"t{number}": (count,) for number, count in enumerate(counts)}
    granule = codec(name).granule((1,))
    segment = max(262_144 // granule, 1) * granule

    def most_of(size):
        return max(codec(each).max_bytes(size) for each in {name, back or name})

    def sizes(count):
        return [min(segment, count - start) for start in range(0, count, segment)] or [0]

    whole = sum(most_of(size) for (count,) in shapes.values() for size in sizes(count))
    limit = 2**20 if back is None else min(max(whole // 128, 2**18), 2**20)
    shards, left = [], 0
    for what, (count,) in shapes.items():
        for start in range(0, count, segment) if count else [0]:
            size = min(segment, count - start)
            most = most_of(size)
            if not shards or most > left:
                shards.append([])
                left = limit
            shards[-1].append((what, start, start + size, start // segment))
            left -= most
    cut = ShardLayout.of(shapes, codec(name), back=back and codec(back))
    assert [
        [(part.tensor, part.start, part.stop, part.number) for part in shard]
        for shard in cut.shards
    ] == shards


def test_small_tensors_share_a_shard_and_a_full_one_is_closed():
    cut = ShardLayout.of({"a": (10,), "b": (SEGMENT_VALUES - 10,), "c": (1,)}, codec("fp32"))
    assert cut.shards == (
        (Segment("a", 0, 10), Segment("b", 0, SEGMENT_VALUES - 10)),
        (Segment("c", 0, 1),),
    )


@settings(max_examples=40, deadline=None)
@given(shapes=some_shapes, name=st.sampled_from([*CODECS]), seed=st.integers(0, 9))
def test_whatever_the_shapes_shards_decode_to_what_the_codec_makes_of_each_tensor(
    shapes, name, seed
):
    cut, tensors = ShardLayout.of(shapes, codec(name), 5), tensors_of(shapes, seed)
    covers_once(cut, shapes)
    payloads = [cut.encode(index, 2, tensors) for index in range(len(cut.shards))]
    assert all(len(payload) <= cut.max_shard_bytes for payload in payloads)
    decoded = decode_all(cut, 2, payloads, shapes)
    assert list(decoded) == list(shapes)
    for what, x in tensors.items():
        alone, expected = bytearray(), torch.empty(x.numel())
        place = Context(columns=x.shape[-1] if x.dim() > 1 else 0)
        codec(name).encode(x.reshape(-1), place, alone)
        codec(name).decode(alone, place, expected)
        assert decoded[what].shape == x.shape
        assert torch.equal(decoded[what].reshape(-1), expected)


def test_many_shards_of_one_tensor_come_back_in_their_places():
    shapes = {"big": (SEGMENT_VALUES * 2 + 9,), "tail": (2, 2)}
    cut, tensors = ShardLayout.of(shapes, codec("fp32")), tensors_of(shapes)
    decoded = decode_all(
        cut, 0, [cut.encode(index, 0, tensors) for index in range(len(cut.shards))], shapes
    )
    assert all(torch.equal(decoded[name], x) for name, x in tensors.items())


def test_decoded_tensors_free_their_payloads_without_a_garbage_collection():
    tensors = DecodedTensors(EXACT, 0, [packed(1.0, 2.0, 3.0, 4.0)], {"x": (4,)})
    assert tensors["x"].tolist() == [1, 2, 3, 4]
    alive = weakref.ref(tensors)
    gc.disable()
    try:
        del tensors
        assert alive() is None
    finally:
        gc.enable()


def test_a_payload_is_a_length_and_the_codecs_bytes_for_each_segment():
    cut = ShardLayout.of({"a": (2,), "b": (1,)}, codec("fp32"))
    payload = cut.encode(0, 0, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([-3.0])})
    assert payload == struct.pack("<I2fIf", 8, 1.0, 2.0, 4, -3.0)


# hostile and broken payloads


@each_codec
def test_a_payload_cut_short_or_too_long_is_refused(name):
    cut = ShardLayout.of(SHAPES, codec(name))
    payload = cut.encode(0, 0, tensors_of(SHAPES))
    for wrong in (
        *(payload[:end] for end in range(0, len(payload), 7)),
        payload[:-1],
        payload + b"\0",
    ):
        with pytest.raises(CorruptPayload):
            cut.decode(0, 0, wrong)


@each_codec
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_flipped_bits_and_arbitrary_bytes_decode_to_bounded_values_or_are_refused(name, data):
    cut = ShardLayout.of(SHAPES, codec(name))
    payload = bytearray(cut.encode(0, 0, tensors_of(SHAPES)))
    if data.draw(st.booleans()):
        for _ in range(3):
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
    else:
        payload = data.draw(st.binary(max_size=len(payload) + 2))
    try:
        values = cut.decode(0, 0, bytes(payload))
    except CorruptPayload:
        assert not cut.is_valid(0, 0, bytes(payload))
        return
    assert cut.is_valid(0, 0, bytes(payload))
    assert [len(x) for x in values] == [part.count for part in cut.shards[0]]
    assert all(not x.numel() or float(x.abs().max()) <= MAX_ABS for x in values)


@pytest.mark.parametrize("length", [0, 3, 15, 17, 2**32 - 1])
def test_a_segment_length_that_lies_is_refused(length):
    payload = struct.pack("<I", length) + packed(1.0, 2.0, 3.0, 4.0)[4:]
    with pytest.raises(CorruptPayload):
        EXACT.decode(0, 0, payload)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, -1.001 * MAX_ABS])
def test_values_that_are_no_update_of_anything_are_refused(value):
    payload = struct.pack("<I4f", 16, 1.0, 2.0, 3.0, value)
    with pytest.raises(CorruptPayload):
        EXACT.decode(0, 0, payload)


def test_the_largest_value_that_is_let_in_is_the_limit():
    payload = packed(MAX_ABS, -MAX_ABS, 0.0, 1.0)
    assert EXACT.decode(0, 0, payload)[0].tolist() == [MAX_ABS, -MAX_ABS, 0.0, 1.0]


@each_codec
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_sender_refuses_what_is_not_finite(name, value):
    tensors = tensors_of(SHAPES)
    tensors["norm"][3] = value
    with pytest.raises(UnencodableTensor, match="1 of 7"):
        ShardLayout.of(SHAPES, codec(name)).encode(0, 0, tensors)


# the mean


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.0, 0.25, 4096.0, 1e-3]), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_the_weighted_mean_is_its_slow_twin_to_the_bit(weights, seed):
    inputs = [
        (w, list(tensors_of({"a": (33,), "b": (5,)}, seed + i).values()))
        for i, w in enumerate(weights)
    ]
    total = np.float32(0)
    for weight in weights:
        total = np.float32(total + np.float32(weight))
    for position, mean in enumerate(weighted_mean(inputs)):
        twin = None
        for weight, values in inputs:
            part = values[position].numpy() * (np.float32(weight) / total)
            twin = part if twin is None else twin + part
        assert mean.numpy().tobytes() == twin.astype(np.float32).tobytes()


def test_a_weight_of_three_counts_as_three_peers_of_weight_one():
    a, b = torch.tensor([8.0, -4.0]), torch.tensor([16.0, 1.0])
    heavy = weighted_mean([(1.0, [a]), (3.0, [b])])[0]
    assert torch.equal(heavy, weighted_mean([(1.0, [a]), *[(1.0, [b])] * 3])[0])
    assert torch.equal(heavy, torch.tensor([14.0, -0.25]))


def test_the_mean_of_the_largest_values_that_are_let_in_is_finite():
    for peers in (1, 2, 3, 7, 64):
        mean = weighted_mean([(1.0, [torch.full((3,), MAX_ABS)])] * peers)[0]
        assert float(mean.max()) == pytest.approx(MAX_ABS)
