"""Every codec is measured through the product's shards, next to a copy of the same buffer."""

import math
import re

import pytest
import torch

from farflock.compression.catalog import CODECS
from farflock.experiments.bench import codec
from farflock.node.errors import Usage
from farflock.node.train.shards import SEGMENT_VALUES

LEAST_BITS = {
    **{"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8.125, "int4": 4.5, "fp4": 4.125, "sign": 1.125},
    "topk:64/4096": 0.3203,
}


@pytest.fixture(scope="module")
def lines():
    from farflock.experiments.measure.metric import Options

    return {metric.metric: metric for metric in codec.run(Options(repeats=1, quick=True))}


def test_there_is_a_line_for_each_codec_and_for_the_sparse_bits(lines):
    assert set(lines) == {f"codec.{name}" for name in CODECS} | {"codec.sparse_bits"}


def test_times_are_positive_and_the_ratio_is_of_value_to_yardstick(lines):
    for line in lines.values():
        assert 0 < line.value < math.inf
        assert 0 < line.yardstick < math.inf
        assert line.ratio > 0


@pytest.mark.parametrize("name", LEAST_BITS)
def test_the_note_says_what_a_value_takes(lines, name):
    assert lines[f"codec.{name}"].note.startswith(f"{LEAST_BITS[name]:.4g} bits per value")


def test_the_sparse_codec_is_held_against_the_entropy_of_positions_and_two_bits(lines):
    line = lines["codec.sparse_bits"]
    assert line.yardstick < line.value <= 0.158
    assert line.yardstick == pytest.approx(64 / 4096 * (7.364 + 2), abs=1e-4)
    assert line.ratio == pytest.approx(line.value / line.yardstick, abs=1e-4)


def test_the_note_has_the_codec_alone_and_the_path_into_fresh_tensors(lines):
    for name in CODECS:
        assert re.search(
            r"alone [\d.e+]+x, into fresh tensors [\d.e+]+x", lines[f"codec.{name}"].note
        )


def test_one_codec_can_be_asked_for_also_with_other_numbers(quick):
    assert [line.metric for line in codec.run(quick("codec.int8:128"))] == ["codec.int8:128"]
    assert [line.metric for line in codec.run(quick("codec.sparse_bits"))] == ["codec.sparse_bits"]


def test_a_codec_that_is_not_there_is_a_usage_error_with_the_nearest(quick):
    with pytest.raises(Usage, match="did you mean 'int8'"):
        list(codec.run(quick("codec.int88")))


def test_all_ways_through_a_codec_see_the_whole_buffer(monkeypatch):
    values = torch.randn(2 * SEGMENT_VALUES, generator=torch.Generator().manual_seed(1))
    shards = codec.Shards.of(CODECS["fp32"](), values)
    assert shards.alone() == 4 * values.numel()
    assert torch.equal(shards.out, values)
    shards.out.zero_()
    shards.exchange()
    assert torch.equal(shards.out, values)
    decoded = []
    monkeypatch.setattr(
        codec, "decode_all", lambda *arguments: decoded.append(codec_decode_all(*arguments))
    )
    shards.fresh()
    assert torch.equal(decoded[0]["x"], values)


def codec_decode_all(*arguments):
    from farflock.node.train.shards import decode_all

    return decode_all(*arguments)


def test_measuring_leaves_torch_with_the_threads_it_had(quick):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in codec.run(quick("codec.fp32")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
