"""Success of a demo: a newcomer came in, and no peer failed except one that came too late."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from farflock.node.demo.demo import Child, Demo
from farflock.node.errors import Failure
from farflock.node.process.status import Status

STATUS = Status(
    1, "run", "peer", "invite", 5, 100, 100, 2.5, 1, ("peer",), True, (), (), 0, 0, 0, {}
)


@pytest.fixture
def demo(tmp_path):
    """A function that makes a demo of one peer and a newcomer from exit codes and token counts."""

    def made(newcomer_code, *, tokens=100, came_in):
        demo = Demo(tmp_path, Path("run.toml"), 1, lambda moment: None)
        for name, code in (("founder", 0), ("newcomer", newcomer_code)):
            (tmp_path / name).mkdir()
            process = SimpleNamespace(returncode=code, poll=lambda code=code: code)
            demo.children.append(Child(name, tmp_path / name, process))
        for name, there in (("founder", True), ("newcomer", came_in)):
            if there:
                status = msgspec.structs.replace(STATUS, tokens=tokens)
                (tmp_path / name / "status.json").write_bytes(msgspec.json.encode(status))
        return demo

    return made


def test_a_newcomer_is_counted_once_it_came_in(demo):
    assert demo(0, came_in=True).joined == 1


def test_one_that_came_after_the_end_is_not_counted_and_fails_nothing(demo):
    late = demo(1, came_in=False)
    assert late.joined == 0
    late.require_success()


@pytest.mark.parametrize("case", [{"came_in": True}, {"came_in": False, "tokens": 60}])
def test_an_error_before_the_end_or_of_one_that_was_in_fails_the_demo(demo, case):
    with pytest.raises(Failure, match="newcomer ended with an error"):
        demo(1, **case).require_success()
