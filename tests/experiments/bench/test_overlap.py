"""The benchmark of overlap: what it compares, that a piece holds one whole exchange,
and a small one over real lines."""

import contextlib
import json

import pytest

from farflock.experiments.bench import overlap
from farflock.experiments.bench.overlap import (
    ARMS,
    FULL,
    QUICK,
    NoOverlap,
    Piece,
    Size,
    measure,
    metric_of,
)
from farflock.experiments.bench.workers.netns import NoHosts, hosts
from farflock.experiments.measure.metric import Options
from farflock.node.model.llama import PRESETS
from farflock.node.run.fit import require_layers
from farflock.optimizers.catalog import method

SMALLEST = Size(PRESETS["tiny"], batch=1, seq=16, steps=4, fragments=2, overlap=2)


def turn(local, overlapping, waiting):
    return {
        arm: Piece(s, s / 2) for arm, s in zip(ARMS, (local, overlapping, waiting), strict=True)
    }


@pytest.mark.parametrize("size", [FULL, QUICK, SMALLEST])
def test_the_arms_train_alike_and_differ_in_their_exchanges_alone(size):
    local, overlapping, waiting = (size.arm(name) for name in ARMS)
    assert (local["method"], local["options"]) == ("local", {})
    assert overlapping["method"] == waiting["method"] == "streaming"
    assert overlapping["options"] == {**waiting["options"], "overlap": size.overlap}
    assert waiting["options"]["overlap"] == 0 < size.overlap
    made = method("streaming", **overlapping["options"])
    require_layers(made, size.model.layers)
    assert made.period == size.fragments * size.steps  # so a fragment is sent every `steps` steps


def test_the_full_size_is_what_the_docstring_says():
    assert (FULL.model.parameters() // 100_000, FULL.fragments, FULL.fragments * FULL.steps) == (
        12,
        3,
        99,
    )
    assert (FULL.batch * FULL.seq, FULL.overlap) == (1024, 5)
    for said in (
        "1.2 million parameters",
        "3 fragments",
        "99 steps",
        "1,024 tokens",
        "5 steps later",
    ):
        assert said in " ".join(overlap.__doc__.split())


def test_the_ratio_is_that_of_tokens_a_second_in_the_same_turn():
    turns = [turn(1.0, 1.25, 2.0), turn(10.0, 12.5, 20.0), turn(1.0, 1.0, 4.0)]
    metric = metric_of(SMALLEST, turns, "overlapping", "overlap.7")
    assert (metric.metric, metric.unit, metric.n, metric.ratio) == ("overlap.7", "tokens/s", 3, 0.8)
    assert metric.value == SMALLEST.tokens / 1.25
    assert SMALLEST.tokens == 2 * 4 * 16
    waiting = metric_of(SMALLEST, turns, "waiting", "overlap.7.waiting")
    assert waiting.ratio == 0.5
    assert "merged 0 steps later" in waiting.note
    assert "2.00 s of computing per piece and worker, 0.50 s without" in waiting.note


def answer(*rounds):
    return {"rounds": [list(one) for one in rounds], "took_s": 1.0, "cpu_s": 1.0}


@pytest.mark.parametrize(
    "answers",
    [
        [answer(), answer()],
        [answer(("ok", 2)), answer()],
        [answer(("partial", 2)), answer(("partial", 2))],
        [answer(("alone", 1)), answer(("alone", 1))],
        [answer(("ok", 2), ("ok", 2)), answer(("ok", 2), ("ok", 2))],
    ],
)
def test_a_piece_without_its_one_exchange_is_not_timed(answers):
    overlap.require_exchanges("overlapping", [answer(("ok", 2)), answer(("ok", 2))], 1)
    with pytest.raises(NoOverlap, match="1 exchanges of all 2"):
        overlap.require_exchanges("overlapping", answers, 1)


def test_a_loop_without_exchanges_has_none():
    overlap.require_exchanges("local", [answer(), answer()], 0)
    with pytest.raises(NoOverlap):
        overlap.require_exchanges("local", [answer(("ok", 2)), answer()], 0)


@pytest.fixture
def measured(monkeypatch):
    """The rates and sizes that are measured; nothing is."""
    asked = []

    def stand_in(size, rate_bits, repeats, name):
        asked.append((size, rate_bits, name))
        return iter(())

    monkeypatch.setattr(overlap, "measure", stand_in)
    return asked


def test_both_rates_are_measured_or_the_one_that_was_asked_for(measured):
    for options in (
        Options(),
        Options(rate_bits=5e7),
        Options(only="overlap.10.waiting", quick=True),
    ):
        list(overlap.run(options))
    names = ["overlap.100", "overlap.10", "overlap.50", "overlap.10"]
    assert [name for _, _, name in measured] == names
    assert [size for size, _, _ in measured] == [FULL, FULL, FULL, QUICK]
    assert [rate for _, rate, _ in measured] == [1e8, 1e7, 5e7, 1e7]


def test_where_lines_cannot_be_limited_there_is_no_number_and_the_reason(monkeypatch, farflock):
    @contextlib.contextmanager
    def nothing(count, rate_bits):
        raise NoHosts("network namespaces need root on Linux")
        yield

    monkeypatch.setattr(overlap, "hosts", nothing)
    code, out, err = farflock("bench", "overlap", "--json")
    assert (code, list(json.loads(out))) == (1, ["error", "exit_code"])
    assert "overlap could not be measured: network namespaces need root on Linux" in err


@pytest.mark.net
@pytest.mark.long
def test_two_processes_over_a_limited_line_exchange_one_fragment_a_piece():
    try:
        with hosts(1, 1e8):
            pass
    except NoHosts as why:
        pytest.skip(str(why))
    hidden, waiting = measure(SMALLEST, 20e6, 1, "overlap.20")
    assert (hidden.metric, waiting.metric) == ("overlap.20", "overlap.20.waiting")
    assert hidden.yardstick == waiting.yardstick > 0
    assert waiting.ratio > 0
    assert hidden.ratio == pytest.approx(hidden.value / hidden.yardstick, abs=1e-4)
