"""The share of its time that a stage computes."""

import pytest

LAYERS = {"narrow": {"computes_ms": 10, "all_ms": 40}, "wide": {"computes_ms": 100, "all_ms": 120}}


def test_the_simulated_stage_agrees_with_the_formula(table):
    found = table("swarm-utilisation", layers=LAYERS, round_trips_ms=[0, 60], microbatches=30)
    assert found["narrow, 60 ms"] == pytest.approx(100 * 10 / (40 + 60))
    for name in ("narrow, 0 ms", "narrow, 60 ms", "wide, 0 ms", "wide, 60 ms"):
        assert found[f"{name}, simulated"] == pytest.approx(found[name])


def test_depth_hides_the_round_trip_but_not_a_slow_wire(table):
    found = table("swarm-utilisation", layers=LAYERS, round_trips_ms=[200], microbatches=1000)
    assert found["wide, 200 ms, deeper"] > 99
    assert found["narrow, 200 ms, deeper"] == pytest.approx(100 * 10 / 15, rel=0.02), (
        "its wire takes 15 ms each way"
    )
