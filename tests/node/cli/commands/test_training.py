"""The ends of `run` and `join`: the exit code states the reason, and the last line what is left."""

import json
import signal
from pathlib import Path

import pytest

from farflock.node.cli.output import Output, conclude

SAVED = Path("checkpoints") / "step-3"


@pytest.mark.parametrize(
    ("asked", "saved", "code"),
    [
        (None, SAVED, 0),
        (signal.SIGINT, SAVED, 130),
        (signal.SIGTERM, SAVED, 0),
        (signal.SIGHUP, SAVED, 0),
        (signal.SIGINT, None, 130),
        (signal.SIGTERM, None, 143),
        (signal.SIGHUP, None, 129),
    ],
)
def test_the_exit_code_says_whether_the_end_was_asked_for_and_saved(capsys, asked, saved, code):
    assert conclude(Output(as_json=True), saved, asked) == code
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    if saved is None:
        assert said["exit_code"] == code
    else:
        assert said == {"checkpoint": str(SAVED), "ended": "left" if asked else "done"}


def test_for_people_it_is_a_sentence(capsys):
    conclude(Output(as_json=False), SAVED, None)
    conclude(Output(as_json=False), SAVED, signal.SIGINT)
    assert capsys.readouterr().out.splitlines() == [
        f"done; the checkpoint is in {SAVED}",
        f"left the run; the checkpoint is in {SAVED}",
    ]


@pytest.mark.parametrize(
    ("trained", "sentence"),
    [(False, "before it began to train; nothing was changed"), (True, "the last checkpoint")],
)
def test_without_a_checkpoint_it_says_whether_the_node_had_trained(capsys, trained, sentence):
    assert conclude(Output(as_json=False), None, signal.SIGTERM, trained) == 143
    assert sentence in capsys.readouterr().err
