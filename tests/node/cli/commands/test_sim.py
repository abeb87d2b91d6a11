"""`farflock sim` runs a manifest in virtual time; the same seed ends in the same state."""

import collections
import json

import pytest
from worlds.card import CARD

from farflock.node.simulate import chaos, pipeline_chaos, returns_chaos, simulation
from farflock.node.simulate.chaos import CELLS, ENOUGH_SEEDS, SeedReport
from farflock.node.simulate.pipeline_chaos import DISASTERS

SHORT = ("--peers", "2", "--set", "run.total_tokens=2048")


def facts(farflock, *arguments):
    code, out, _ = farflock("sim", *arguments, "--json")
    assert code == 0
    return json.loads(out.splitlines()[-1])


def require_promised(found):
    """Require what the command says that it reports."""
    assert {"state_hash", "rounds", "losses", "bytes"} <= found.keys()
    assert found["rounds"] > 0
    assert found["bytes"] > 0
    assert all(0 < loss < 10 for loss in found["losses"])
    assert 3 < found["held_out_loss"] < 7
    assert 0 < found["held_out_standard_error"] < 0.5


def test_it_reports_what_was_promised_and_the_same_seed_ends_alike_and_another_otherwise(farflock):
    first, second, other = (
        facts(farflock, *SHORT, "--set", f"run.seed={seed}") for seed in (3, 3, 4)
    )
    assert first == second
    assert first["state_hash"] != other["state_hash"]
    require_promised(first)


def test_prepared_data_are_trained_on_and_evaluated(farflock, folder):
    first, second = (facts(farflock, *SHORT, "--data", folder) for _ in range(2))
    assert first == second
    assert first["state_hash"] != facts(farflock, *SHORT)["state_hash"]
    assert 0 < first["held_out_loss"] < 6


def test_a_dry_run_trains_nothing_and_shows_the_manifest(farflock, manifest):
    shown = facts(farflock, manifest, "--dry-run")
    assert shown.keys() == {"manifest", "hash", "world", "world_hash"}
    assert 'name = "plays"' in shown["manifest"]
    assert shown["world"]["peers"] == 4


def test_a_dry_runs_hashes_tell_the_manifest_from_its_world(farflock, manifest):
    one, wet = (
        facts(farflock, manifest, "--dry-run", *options) for options in ((), ("--loss", "0.1"))
    )
    assert one["hash"] == wet["hash"]
    assert one["world_hash"] != wet["world_hash"]


def test_of_all_frames_the_named_share_is_lost(farflock, monkeypatch):
    networks = []

    class Kept(simulation.SimNetwork):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.lines = []
            networks.append(self)

        def links(self, peer):
            self.lines.append(super().links(peer))
            return self.lines[-1]

    monkeypatch.setattr(simulation, "SimNetwork", Kept)
    weather = ("--loss", "0.3", "--set", "method.name=diloco", "--set", "run.total_tokens=4096")
    facts(farflock, "--peers", "5", *weather)
    (network,) = networks
    frames = sum(line.sent_frames for line in network.lines)
    assert frames > 500
    assert network.fired["loss"] / frames == pytest.approx(0.3, abs=0.04)


def test_models_are_on_the_device_that_was_chosen(farflock, card):
    here = facts(farflock, *SHORT)
    assert CARD.to_card_bytes == 0
    there = facts(farflock, *SHORT, "--device", "auto")
    assert CARD.to_card_bytes > 0
    # bf16 rounds otherwise, and nothing else differs
    assert there["held_out_loss"] == pytest.approx(here["held_out_loss"], rel=2e-2)
    assert there["state_hash"] != here["state_hash"]
    assert there["bytes"] == pytest.approx(here["bytes"], rel=1e-2)


# Disasters.


@pytest.fixture
def reports(monkeypatch):
    """Reports that stand in for disasters: a violation in seed 8, the rest as the test says."""
    made, asked, runs = {}, [], []

    def run_seeds(first, count, workers, name, run=chaos.run_seed):
        asked.append((first, count, workers) if name is None else (first, count, workers, name))
        runs.append(run)
        for seed in range(first, first + count):
            yield made.get(
                seed, SeedReport(seed, [], collections.Counter(CELLS), 5, "hash", 2.0 + seed / 100)
            )

    monkeypatch.setattr(chaos, "run_seeds", run_seeds)
    made |= {"asked": asked, "runs": runs}
    return made


def disasters(farflock, *arguments):
    code, out, err = farflock("sim", "--chaos", *arguments, "--json")
    return code, json.loads(out.splitlines()[-1]), err


def test_one_seed_of_disasters_reports_what_was_promised(farflock):
    code, found, _ = disasters(farflock, "--seeds", "1", "--first-seed", "3")
    assert code == 0
    assert (found["seeds"], found["violations"], found["failures"]) == (1, 0, [])
    assert sum(sum(row.values()) for row in found["faults"].values()) == chaos.FAULTS
    assert len(found["empty"]) >= len(CELLS) - chaos.FAULTS


def test_a_violation_comes_with_the_command_that_brings_it_back_and_ends_in_failure(
    farflock, reports
):
    reports[8] = SeedReport(
        8, ["two are one", "and more"], collections.Counter(CELLS), 5, "hash", 30.0
    )
    code, found, _ = disasters(farflock, "--seeds", "5", "--first-seed", "6", "--workers", "2")
    again = "farflock sim --chaos --seeds 1 --first-seed 8"
    assert code == 1
    assert found["failures"] == [{"seed": 8, "command": again, "violation": "two are one"}]
    assert (found["violations"], found["slowest_recovery_s"]) == (1, 30.0)
    assert reports["asked"] == [(6, 5, 2)]


def test_one_method_may_be_chosen_and_is_part_of_the_command_that_brings_a_violation_back(
    farflock, reports
):
    reports[8] = SeedReport(8, ["two are one"], collections.Counter(CELLS), 5, "hash", 30.0)
    _, found, _ = disasters(farflock, "--seeds", "1", "--first-seed", "8", "--method", "demo")
    assert (
        found["failures"][0]["command"]
        == "farflock sim --chaos --seeds 1 --first-seed 8 --method demo"
    )
    assert reports["asked"] == [(8, 1, 1, "demo")]
    _, shown, _ = disasters(farflock, "--dry-run", "--method", "edit")
    assert {name for name, _ in shown["arms"]} == {"edit"}


def test_one_method_alone_need_not_meet_every_phase_in_every_fault(farflock, reports):
    reports.update(
        {
            seed: SeedReport(seed, [], collections.Counter(), 5, "hash")
            for seed in range(ENOUGH_SEEDS)
        }
    )
    code, _, _ = disasters(farflock, "--seeds", str(ENOUGH_SEEDS), "--method", "local")
    assert code == 0


def test_an_unknown_method_of_disasters_and_one_without_disasters_are_usage_errors(farflock):
    code, _, err = farflock("sim", "--chaos", "--method", "dilocoo")
    assert code == 2
    assert "choose from local, ddp, diloco" in err
    code, _, err = farflock("sim", "--method", "diloco")
    assert code == 2
    assert "--set method.name=NAME" in err


def test_more_workers_than_seeds_are_not_started(farflock, reports):
    disasters(farflock, "--seeds", "3", "--workers", "9")
    assert reports["asked"] == [(0, 3, 3)]


@pytest.mark.parametrize(("seeds", "code"), [(ENOUGH_SEEDS - 1, 0), (ENOUGH_SEEDS, 1)])
def test_a_fault_that_never_met_a_phase_fails_where_there_were_seeds_enough(
    farflock, reports, seeds, code
):
    fired = collections.Counter(CELLS)
    del fired["kill", "vote"]
    reports.update({seed: SeedReport(seed, [], fired, 5, "hash") for seed in range(seeds)})
    ended, found, _ = disasters(farflock, "--seeds", str(seeds))
    assert (ended, found["empty"]) == (code, ["kill in vote"])


def test_a_table_of_kinds_and_phases_is_shown_to_people(farflock, reports):
    code, out, _ = farflock("sim", "--chaos", "--seeds", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["decided", "held", "offer", "reduced", "transfer", "vote"]
    table = [line.split() for line in lines[1 : 1 + len(chaos.KINDS)]]
    assert table == [[kind, *["2"] * 6] for kind in chaos.KINDS]


def test_a_dry_run_of_disasters_runs_none(farflock, reports):
    code, shown, _ = disasters(farflock, "--dry-run", "--seeds", "7")
    _, other, _ = disasters(farflock, "--dry-run", "--seeds", "8")
    assert code == 0
    assert shown["seeds"] == 7
    assert shown["hash"] != other["hash"]
    assert reports["asked"] == []


def test_disasters_take_no_manifest_and_no_device(farflock, manifest):
    code, _, err = farflock("sim", manifest, "--chaos")
    assert code == 2
    assert "leave out the manifest" in err
    code, _, err = farflock("sim", "--chaos", "--device", "cuda")
    assert code == 2
    assert "leave out --device cuda" in err


# Disasters of pipelines.


def test_a_seed_of_a_pipeline_reports_what_was_promised(farflock):
    code, found, _ = disasters(farflock, "--pipeline", "--seeds", "1", "--first-seed", "3")
    assert code == 0
    assert (found["seeds"], found["violations"], found["failures"]) == (1, 0, [])
    assert found["methods"] == {"noloco": 1}
    assert sum(found["faults"]["noloco"].values()) >= 3
    assert found["slowest_recovery_s"] < pipeline_chaos.RECOVERY_S


def test_disasters_of_pipelines_are_counted_by_method_and_fail_with_the_command_that_repeats_them(
    farflock, reports
):
    fired = collections.Counter({("kill", "lean"): 1, ("stop", "lean"): 1})
    reports[8] = SeedReport(8, ["two are one"], fired, 5, "hash", 30.0)
    command = ("--pipeline", "--seeds", "2", "--first-seed", "8", "--method", "lean")
    code, found, _ = disasters(farflock, *command)
    again = "farflock sim --chaos --pipeline --seeds 1 --first-seed 8 --method lean"
    assert code == 1
    assert found["failures"] == [{"seed": 8, "command": again, "violation": "two are one"}]
    none = dict.fromkeys(DISASTERS, 0)
    assert found["faults"] == {"lean": none | {"kill": 1, "stop": 1}}
    assert found["methods"] == {"lean": 2}
    assert reports["runs"] == [pipeline_chaos.run_pipeline_seed]
    code, out, _ = farflock("sim", "--chaos", *command)
    assert code == 1
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["seeds", *DISASTERS],
        ["lean", "2", "1", "0", "0", "0", "1", "0"],
    ]


def test_a_dry_run_of_pipelines_disasters_is_another_one_than_of_swarms(farflock, reports):
    shown, other = (
        disasters(farflock, "--dry-run", *options)[1] for options in (("--pipeline",), ())
    )
    assert shown["hash"] != other["hash"]
    assert shown["kinds"] == list(DISASTERS)
    assert reports["asked"] == []


def test_a_pipeline_is_for_disasters_and_a_method_without_one_is_refused(farflock):
    code, _, err = farflock("sim", "--pipeline")
    assert code == 2
    assert "--pipeline is for --chaos" in err
    code, _, err = farflock("sim", "--chaos", "--pipeline", "--method", "async")
    assert code == 2
    assert "does not run inside pipelines" in err


@pytest.mark.parametrize(
    ("option", "named"),
    [(("--set", "train.lr=-1"), "train.lr must be a number > 0"), (("--loss", "2"), "--loss")],
)
def test_wrong_values_are_usage_errors(farflock, option, named):
    code, _, err = farflock("sim", *option)
    assert code == 2
    assert named in err


# Disasters of returns.


def test_a_seed_of_returns_reports_what_was_promised(farflock):
    code, found, _ = disasters(farflock, "--returns", "--seeds", "1", "--first-seed", "3")
    assert code == 0
    assert (found["seeds"], found["violations"], found["failures"]) == (1, 0, [])
    assert found["methods"] == {"noloco": 1}
    assert sum(found["faults"]["noloco"].values()) == 1
    assert found["slowest_recovery_s"] < returns_chaos.ONE_CHAIN_S


def test_disasters_of_returns_are_counted_by_method_and_fail_with_the_command_that_repeats_them(
    farflock, reports
):
    fired = collections.Counter({("cut", "lean"): 1, ("copy", "lean"): 1})
    reports[8] = SeedReport(8, ["two are one"], fired, 5, "hash", 30.0)
    command = ("--returns", "--seeds", "2", "--first-seed", "8", "--method", "lean")
    code, found, _ = disasters(farflock, *command)
    again = "farflock sim --chaos --returns --seeds 1 --first-seed 8 --method lean"
    assert code == 1
    assert found["failures"] == [{"seed": 8, "command": again, "violation": "two are one"}]
    none = dict.fromkeys(returns_chaos.COMING_BACK, 0)
    assert found["faults"] == {"lean": none | {"cut": 1, "copy": 1}}
    assert found["methods"] == {"lean": 2}
    assert reports["runs"] == [returns_chaos.run_returns_seed]


def test_a_dry_run_of_returns_names_their_disasters(farflock, reports):
    shown, other = (
        disasters(farflock, "--dry-run", option)[1] for option in ("--returns", "--pipeline")
    )
    assert shown["hash"] != other["hash"]
    assert shown["kinds"] == list(returns_chaos.COMING_BACK)
    assert reports["asked"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--returns",), "--returns is for --chaos"), (("--chaos", "--returns", "--pipeline"), "one")],
)
def test_returns_are_one_kind_of_disasters(farflock, options, words):
    code, _, err = farflock("sim", *options)
    assert code == 2
    assert words in err
