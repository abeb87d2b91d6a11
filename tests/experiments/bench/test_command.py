"""`farflock bench`: JSON lines on standard output, everything else on standard error, and usage
errors that name the remedy."""

import json
from types import SimpleNamespace

import pytest

from farflock.experiments.bench import command
from farflock.experiments.measure.metric import Metric, NotMeasured

FIELDS = ["metric", "value", "yardstick", "ratio", "n", "load", "unit", "note"]


@pytest.fixture
def asked(monkeypatch):
    """The options that each benchmark was run with, by name; each yields `NAME.a` and `NAME.b` and
    measures nothing."""
    options_of = {}

    def load_module(path):
        name = path.rpartition(".")[2]

        def run(options):
            options_of[name] = options
            for metric in (f"{name}.a", f"{name}.b"):
                yield Metric(metric, 1.23456789, 2.0, 0.5, options.repeats, 0.1)

        return SimpleNamespace(run=run)

    monkeypatch.setattr(command, "import_module", load_module)
    return options_of


def test_each_line_of_output_is_one_metric(farflock, asked):
    code, out, err = farflock("bench", "codec", "--repeats", "3")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["metric"] for line in lines] == ["codec.a", "codec.b"]
    assert all(list(line) == FIELDS for line in lines)
    assert lines[0]["value"] == 1.23456789
    assert "measuring codec" in err


def test_people_get_a_table_beside_it_and_programs_do_not(farflock, asked):
    _, out, err = farflock("bench", "codec")
    assert "yardstick" in err.splitlines()[1]
    assert "1.235" in err
    assert farflock("bench", "codec", "--json") == (0, out, "measuring codec\n")


def test_without_a_name_everything_is_measured(farflock, asked):
    assert farflock("bench")[0] == 0
    assert list(asked) == [name for name in command.BENCHMARKS if name != "gpu"]
    assert all(options.only is None for options in asked.values())


def test_one_that_cannot_be_measured_is_said_at_the_end_and_the_others_stand(
    farflock, asked, monkeypatch
):
    load_module = command.import_module

    def load(path):
        if not path.endswith(".loop"):
            return load_module(path)

        def run(options):
            raise NotMeasured("the two loops train different models")
            yield

        return SimpleNamespace(run=run)

    monkeypatch.setattr(command, "import_module", load)
    code, out, err = farflock("bench")
    assert code == 1
    assert [json.loads(line).get("metric") for line in out.splitlines()][:4] == [
        "codec.a",
        "codec.b",
        "sim.a",
        "sim.b",
    ]
    assert "loop could not be measured: the two loops train different models" in err
    assert "kill.b" in err


def test_the_whole_name_of_a_metric_gives_that_line_alone(farflock, asked):
    code, out, _ = farflock("bench", "sync.b", "--json")
    assert code == 0
    assert [json.loads(line)["metric"] for line in out.splitlines()] == ["sync.b"]
    assert asked["sync"].only == "sync.b"


def test_a_metric_that_a_benchmark_does_not_have_is_a_usage_error(farflock, asked):
    code, out, err = farflock("bench", "sync.c")
    assert (code, out) == (2, "")
    assert "did you mean 'sync." in err


def test_options_reach_the_benchmark(farflock, asked):
    farflock("bench", "sync", "--repeats", "7", "--rate", "10mbit", "--quick")
    given = asked["sync"]
    assert (given.repeats, given.rate_bits, given.quick) == (7, 1e7, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["kodec"], "did you mean 'codec'?"),
        (["codec", "syncc.4"], "did you mean 'sync'?"),
        (["--rate", "fast"], "such as 100mbit"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_usage_is_exit_code_2_before_anything_is_measured(farflock, asked, arguments, named):
    code, out, err = farflock("bench", *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert not asked


def test_a_usage_error_is_json_too(farflock):
    code, out, _ = farflock("bench", "nonsense", "--json")
    assert code == 2
    assert json.loads(out)["exit_code"] == 2


def test_every_benchmark_in_the_table_is_a_module_of_this_package():
    assert all(
        path == f"farflock.experiments.bench.{name}" for name, path in command.BENCHMARKS.items()
    )
