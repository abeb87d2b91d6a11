"""Bytes of the real codecs and the steps that they make."""

import pytest

SMALL = {
    "sequences": 2,
    "length": 32,
    "microbatches": 16,
    "bit_per_s": 200e6 / 128,
    "latency_s": 0.05,
    "computes_s": [0.0, 0.01],
    "whole_steps": 100,
    "subspace_steps": 300,
}


def test_bytes_are_two_for_each_number_two_for_an_id_and_a_stamp(table):
    found = table("subspace-nano", **SMALL)
    assert found["whole, bytes a token"] == 2 * 1024
    assert found["subspace, bytes a token"] == pytest.approx(2 * 160 + 2 + 12 / 64)


def test_the_gain_is_the_steps_ratio_over_how_many_more_are_needed(table):
    found = table("subspace-nano", **SMALL)
    whole, compressed = (found[f"{name}, 1F1B, stage 0.01 s"] for name in ("whole", "subspace"))
    assert found["steps faster, 1F1B, stage 0.01 s"] == pytest.approx(whole / compressed)
    assert found["net gain, 1F1B, stage 0.01 s"] == pytest.approx(whole / compressed / 3)
    assert whole > 3 * compressed


def test_computing_and_one_line_cost_time_and_depth_saves_it(table):
    found = table("subspace-nano", **SMALL)
    plain = found["whole, 1F1B, stage 0.01 s"]
    assert found["whole, 1F1B, stage 0 s"] < plain
    assert (
        found["whole, 1F1B twice as deep, stage 0.01 s"]
        < plain
        < found["whole, 1F1B, one line in and out, stage 0.01 s"]
    )
