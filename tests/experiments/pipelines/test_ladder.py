"""Tokens a second by line and codec."""

import pytest

CODECS = ["fp32", "aqsgd8", "aqsgd4", "hadamard4"]
SMALL = {
    "length": 32,
    "width": 64,
    "microbatches": 6,
    "stage_s": 0.1,
    "mbit_per_s": [1.0, 10.0, 1e6],
    "codecs": CODECS,
}


def test_the_faster_the_line_the_faster_until_only_computing_is_left(table):
    found = table("activation-ladder", **SMALL)
    for codec in CODECS:
        slow, middle, fast = (found[f"{codec}, {mbit:g} Mbit/s"] for mbit in SMALL["mbit_per_s"])
        assert slow < middle < fast
        assert fast == pytest.approx(6 * 32 / ((6 + 8 - 1) * 0.1), rel=1e-3)


def test_fewer_bits_are_faster_and_the_ratio_is_as_said(table):
    found = table("activation-ladder", **SMALL)
    rates = [found[f"{codec}, 1 Mbit/s"] for codec in CODECS]
    assert rates == sorted(rates)
    assert found["hadamard4 over fp32, 1 Mbit/s"] == pytest.approx(rates[-1] / rates[0])


def test_aqsgd_sends_a_sample_whole_once_and_then_its_change(table):
    once, often = (table("activation-ladder", **SMALL, visits=visits) for visits in (1, 10))
    assert once["aqsgd4, bits a value forward"] == pytest.approx(16, rel=0.02)
    whole, change = once["aqsgd4, bits a value forward"], often["aqsgd4, bits a value forward"]
    assert change == pytest.approx((whole + 9 * 4.4) / 10, rel=0.05)
    assert (
        once["hadamard4, bits a value forward"] == often["hadamard4, bits a value forward"] == 4.5
    )
