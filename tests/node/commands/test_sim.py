"""`farflock sim` runs a manifest in virtual time; the same seed ends in the same state."""

import json

import pytest

SHORT = ("--peers", "2", "--set", "run.total_tokens=2048")


def facts(farflock, *arguments):
    code, out, _ = farflock("sim", *arguments, "--json")
    assert code == 0
    return json.loads(out.splitlines()[-1])


def test_the_same_seed_ends_in_the_same_state_and_another_in_another(farflock):
    first, second, other = (facts(farflock, *SHORT, "--set", f"run.seed={seed}") for seed in (3, 3, 4))
    assert first == second
    assert first["state_hash"] != other["state_hash"]


def test_it_reports_what_was_promised(farflock):
    found = facts(farflock, *SHORT)
    assert {"state_hash", "rounds", "losses", "bytes"} <= found.keys()
    assert found["rounds"] > 0
    assert found["bytes"] > 0
    assert all(0 < loss < 10 for loss in found["losses"])


def test_a_dry_run_trains_nothing_and_shows_the_manifest(farflock, manifest):
    shown = facts(farflock, manifest, "--dry-run")
    assert shown.keys() == {"manifest", "hash"}
    assert 'name = "plays"' in shown["manifest"]


@pytest.mark.parametrize(("option", "named"), [(("--set", "train.lr=-1"), "train.lr: -1"), (("--loss", "2"), "--loss")])
def test_wrong_values_are_usage_errors(farflock, option, named):
    code, _, err = farflock("sim", *option)
    assert code == 2
    assert named in err
