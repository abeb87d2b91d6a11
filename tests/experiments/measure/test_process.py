"""A fresh process gets its settings as JSON; its lines come back, or the reason why none do."""

import pytest
from worlds.waiting import LIMIT_S

from farflock.experiments.measure.metric import NotMeasured
from farflock.experiments.measure.process import lines_of

pytestmark = pytest.mark.net

ECHO = """
import json, sys, time
settings = json.loads(sys.argv[1])
time.sleep(settings.get("sleep_s", 0.0))
for number in range(settings["lines"]):
    print(json.dumps({"number": number}))
if settings.get("fails"):
    raise ValueError("too bad")
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_lines.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_lines"


def test_its_lines_come_back(echo):
    assert lines_of("it", echo, {"lines": 2}, LIMIT_S) == [{"number": 0}, {"number": 1}]


def test_a_failure_is_told_with_its_last_line(echo):
    with pytest.raises(NotMeasured, match=r"^it ended with 1: ValueError: too bad$"):
        lines_of("it", echo, {"lines": 1, "fails": True}, LIMIT_S)


def test_one_that_takes_too_long_is_ended(echo):
    with pytest.raises(NotMeasured, match=r"^it took more than 0\.5 s$"):
        lines_of("it", echo, {"lines": 1, "sleep_s": 3600.0}, 0.5)
