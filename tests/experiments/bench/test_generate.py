"""Sampling is compared with transformers and with a model without a cache, on the same text."""

import sys

import pytest

from farflock.experiments.bench import generate
from farflock.experiments.measure.metric import NotMeasured


def test_both_yardsticks_are_measured(quick):
    pytest.importorskip("transformers")
    lines = list(generate.run(quick()))
    assert [line.metric for line in lines] == ["generate.cache", "generate"]
    for line in lines:
        assert line.value > 0
        assert line.yardstick > 0
        assert line.ratio > 0
        assert line.n == 2
        assert "24 tokens after 16" in line.note


def test_without_transformers_the_cache_is_measured_all_the_same(quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    lines = generate.run(quick())
    assert next(lines).metric == "generate.cache"
    with pytest.raises(NotMeasured, match=r"transformers is not installed"):
        next(lines)
    assert [line.metric for line in generate.run(quick("generate.cache"))] == ["generate.cache"]


def test_what_is_measured_is_the_long_text():
    assert generate.TOKENS == 512
    assert generate.MODEL.context >= generate.TOKENS + len(generate.PROMPT)
    assert 10e6 < generate.MODEL.parameters() < 30e6


def test_ways_that_say_different_texts_are_not_compared():
    with pytest.raises(NotMeasured, match="say different texts"):
        generate.alternating(lambda tokens: [1] * tokens, lambda tokens: [2] * tokens, 3, 1)
