"""The command line starts fast, prints each error as one sentence, and ends with its exit code."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from worlds.waiting import ended, output_of

from farflock.node.cli import main as cli
from farflock.node.errors import Failure, RefusedByRun, Terminated, Usage
from farflock.node.model.llama import PRESETS, build
from farflock.node.state import checkpoint
from farflock.swarm.frame import VERSION as PROTOCOL

ROOT = Path(__file__).parents[3]
TINY = PRESETS["tiny"]


@pytest.fixture
def failing(monkeypatch):
    """A function that puts a command `fail` in the table, which raises what it is given."""

    def install(error):
        @click.command("fail")
        @click.option("--json", "as_json", is_flag=True)
        def command(as_json):
            raise error

        monkeypatch.setattr(
            cli, "import_module", lambda name: type("Module", (), {"command": command})
        )
        monkeypatch.setitem(cli.COMMANDS, "fail", ("nowhere:command", "It fails."))

    return install


def test_without_pytorch_the_line_that_installs_it_is_named(failing, farflock):
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    code, _, err = farflock("fail")
    assert code == 1
    assert err.startswith("farflock: PyTorch is not installed; run `pip install torch")
    assert len(err.splitlines()) == 1


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a tiny model."""
    model = build(TINY, 0)
    files = {"config.json": msgspec.json.encode(TINY)}
    meta = {"run": "ab12", "step": 7, "tokens": 640}
    return checkpoint.save(
        tmp_path / "checkpoints", 7, {"model": dict(model.named_parameters())}, meta, files
    )


def fresh(*arguments, **options):
    """A command in a process of its own."""
    command = [sys.executable, "-m", "farflock.node.cli", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.net
def test_help_lists_every_command():
    process = fresh("--help")
    out = output_of(process, "the help")
    assert process.returncode == 0
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in cli.COMMANDS)


def test_every_command_is_in_one_group_and_a_newcomer_is_told_where_to_begin(farflock):
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.COMMANDS)
    assert "First time? Run `farflock demo`." in farflock("--help")[1]


@pytest.mark.parametrize("name", ["run", "join", "sim"])
def test_the_help_of_long_commands_has_examples(farflock, name):
    assert re.search(rf"Examples:\n    farflock {name} ", farflock(name, "--help")[1])


GROUPS = {"data": ("prepare", "show"), "tokenizer": ("train",)}
NAMES = [(name, part) for name in cli.COMMANDS for part in GROUPS.get(name, [""])]


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_each_command_in_the_table_exists_and_explains_itself(farflock, words):
    named = [*filter(None, words)]
    code, out, _ = farflock(*named, "--help")
    assert code == 0
    assert out.startswith(f"Usage: farflock {' '.join(named)}")
    assert "--json" in out


def test_without_a_command_the_help_is_shown_as_a_usage_error(farflock):
    code, out, err = farflock()
    assert code == 2
    assert all(f"{title}:" in out + err for title in cli.GROUPS)


def test_the_version_is_that_of_the_package(farflock):
    from farflock import __version__

    said = f"farflock {__version__}, protocol {PROTOCOL}\n"
    assert farflock("--version") == (0, said, "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "CHECKPOINT"),
        (["join"], "no invite given; paste the word that begins with `farflock:`"),
        (["join", "x", "--host", "999.1.1.1"], "--host: '999.1.1.1' is no address, no interface"),
        (["run", __file__, "--advertise", "4002"], "--advertise: '4002' is not an address and a"),
        (["join", "x", "--cpu", "0%"], "--cpu': '0%' is no share; write 1% to 100%"),
        (["join", "x", "--up", "5"], "--up: '5' is not a rate; write a number and kbit, mbit or"),
        (["sim", "--peers", "0"], "--peers"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_what_was_wrong(farflock, arguments, named):
    code, out, err = farflock(*arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("kind", "code"), [(Failure, 1), (Usage, 2), (RefusedByRun, 3)])
def test_errors_of_ours_are_one_sentence_with_their_exit_code(farflock, failing, kind, code):
    failing(kind("the tide is out", "it is noon", "wait"))
    assert farflock("fail") == (code, "", "farflock: the tide is out: it is noon; wait\n")


def test_with_json_the_last_line_of_output_is_the_error(farflock, failing):
    failing(RefusedByRun("the tide is out", "it is noon", "wait"))
    code, out, err = farflock("fail", "--json")
    assert json.loads(out.splitlines()[-1]) == {
        "error": "the tide is out: it is noon; wait",
        "exit_code": code,
    }
    assert err.startswith("farflock: the tide is out")


def test_a_usage_error_is_json_too(farflock):
    code, out, _ = farflock("sim", "--peers", "0", "--json")
    assert json.loads(out.splitlines()[-1])["exit_code"] == code == 2


def test_an_interruption_is_exit_code_130(farflock, failing):
    failing(KeyboardInterrupt())
    code, out, err = farflock("fail")
    assert (code, out) == (130, "")
    assert "interrupted" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_end_a_command_cleans_up_and_exits_with_the_signal_s_code(
    farflock, failing, number
):
    failing(Terminated(number))
    code, out, err = farflock("fail", "--json")
    assert code == 128 + number
    assert json.loads(out)["exit_code"] == code
    assert "asked to stop" in err


def test_a_real_sigterm_is_raised_where_the_program_is_and_the_handler_goes_with_the_command(
    farflock, saved, monkeypatch
):
    from farflock.node.model import generate

    monkeypatch.setattr(
        generate, "draw", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM) or 65
    )
    code, out, err = farflock("generate", saved)
    assert (code, out) == (143, "")
    assert err.strip() == "farflock: asked to stop; everything that was running has stopped"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_fault_of_ours_is_one_sentence_and_a_log_with_the_traceback(
    farflock, failing, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing(ZeroDivisionError("division by zero"))
    code, _, err = farflock("fail")
    assert code == 1
    assert len(err.splitlines()) == 1
    log = Path(re.search(r"\S+\.log", err)[0])
    assert log.parent == tmp_path
    assert "Traceback" in log.read_text()
    assert "ZeroDivisionError" in err


def test_a_full_disk_is_no_fault_of_ours(farflock, failing):
    failing(OSError(28, "No space left on device", "/somewhere/step-3"))
    code, _, err = farflock("fail")
    assert code == 1
    assert "/somewhere/step-3" in err
    assert "free some space" in err


@pytest.mark.net
def test_a_reader_that_has_seen_enough_ends_the_command_quietly():
    process = fresh("sim", "--dry-run", env={**os.environ, "PYTHONUNBUFFERED": "1"})
    process.stdout.close()
    err = process.stderr.read()
    ended(process, "the command")
    process.stderr.close()
    assert "Traceback" not in err
    assert "bug in Farflock" not in err


def test_a_real_signal_in_the_midst_of_sampling_ends_it_with_130(farflock, saved, monkeypatch):
    from farflock.node.model import generate

    monkeypatch.setattr(
        generate, "draw", lambda *arguments: os.kill(os.getpid(), signal.SIGINT) or 65
    )
    code, out, err = farflock("generate", saved)
    assert (code, out) == (130, "")
    assert err.strip() == "farflock: interrupted; everything that was running has stopped"


def test_generate_is_a_function_of_checkpoint_prompt_and_seed(farflock, saved):
    options = ("--prompt", "Once", "--tokens", "12", "--json")
    first, second, other = (
        json.loads(farflock("generate", saved, *options, "--seed", seed)[1].splitlines()[-1])
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first["prompt"] == "Once"
    assert len(first["text"]) > 0


def test_generate_prints_the_prompt_and_what_follows(farflock, saved):
    code, out, err = farflock(
        "generate", saved, "--prompt", "Once", "--tokens", "5", "--temperature", "0", "--top-k", "0"
    )
    assert (code, err) == (0, "")
    assert out.startswith("Once")


def test_a_streamed_text_is_the_text(farflock, saved):
    options = ("--prompt", "Once", "--tokens", "40", "--top-p", "0.9", "--seed", "3")
    whole, streamed = (farflock("generate", saved, *options, *more) for more in ([], ["--stream"]))
    assert whole == streamed
    code, out, err = farflock("generate", saved, *options, "--stream", "--json")
    assert code == 0
    assert "Once" + json.loads(out)["text"] + "\n" == whole[1]
    assert err == whole[1]


def test_generate_from_nothing_is_a_failure_with_the_remedy(farflock, tmp_path):
    code, _, err = farflock("generate", tmp_path / "nothing")
    assert code == 1
    assert "there is no checkpoint" in err
    assert "step-N" in err


def test_a_damaged_checkpoint_is_a_failure_that_says_so(farflock, saved):
    (saved / "model.safetensors").write_bytes(b"not any more")
    code, _, err = farflock("generate", saved)
    assert code == 1
    assert "damaged" in err


def test_export_writes_a_folder_and_never_over_another(farflock, saved, tmp_path):
    target = tmp_path / "hf"
    code, out, _ = farflock("export", saved.parent, target, "--json")
    assert code == 0
    assert json.loads(out)["folder"] == str(target)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in target.iterdir()
    }
    assert "640" in (target / "README.md").read_text()
    code, _, err = farflock("export", saved, target)
    assert code == 1
    assert "--force" in err
    assert farflock("export", saved, target, "--force")[0] == 0
