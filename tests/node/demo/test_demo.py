"""A demo's count of newcomers, its peers' wait for one, and the errors that fail it."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from worlds.peers import node_status

from farflock.node.demo.demo import (
    HOLD_AT,
    MIN_RUN_S,
    NEWCOMER_TIMEOUT_S,
    SLOW_STEP_S,
    Child,
    Demo,
)
from farflock.node.errors import Failure

STATUS = node_status(peer="peer", step=5, total_tokens=100, members=("peer",))


@pytest.fixture
def demo(tmp_path):
    """A function that makes a demo of one peer and a newcomer with these exit codes and tokens."""

    def made(newcomer_code, *, tokens=100, came_in, steps=0, contributors=2):
        demo = Demo(tmp_path, Path("run.toml"), 1, lambda moment: None, steps, contributors)
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


def receipt(demo, *participants, status="ok"):
    """Let the newcomer apply a round of these peers."""
    line = msgspec.json.encode({"participants": participants, "status": status}) + b"\n"
    with (demo.children[1].folder / "receipts.jsonl").open("ab") as file:
        file.write(line)


def look(demo):
    for child in demo.children:
        child.look(demo.contributors)


def test_a_newcomer_is_counted_once_a_round_with_another_peer_included_it(demo):
    swarm = demo(0, came_in=True)
    for participants, status in (
        ((), "ok"),
        (("peer",), "ok"),
        (("a", "b"), "ok"),
        (("a", "peer"), "failed"),
    ):
        receipt(swarm, *participants, status=status)
        look(swarm)
        assert swarm.joined == 0
    receipt(swarm, "a", "peer", status="partial")
    look(swarm)
    assert swarm.joined == 1
    assert not swarm.missing()


def test_a_receipt_that_is_being_written_is_passed_over(demo):
    swarm = demo(0, came_in=True)
    receipt(swarm, "a", "peer")
    with (swarm.children[1].folder / "receipts.jsonl").open("ab") as file:
        file.write(b'{"participants": ["a", "pe')
    look(swarm)
    assert swarm.joined == 1


def test_without_exchanges_a_member_that_trained_is_counted(demo):
    swarm = demo(0, came_in=True, contributors=0)
    look(swarm)
    assert swarm.joined == 1


def test_where_a_round_may_close_with_one_contribution_the_newcomers_own_counts(demo):
    swarm = demo(0, came_in=True, contributors=1)
    receipt(swarm, "a")
    look(swarm)
    assert swarm.joined == 0
    receipt(swarm, "peer", status="alone")
    look(swarm)
    assert swarm.joined == 1


def test_a_newcomer_that_comes_after_the_end_is_not_counted_and_fails_nothing(demo):
    late = demo(1, came_in=False)
    look(late)
    assert late.joined == 0
    late.require_success()


def brake(demo):
    return float((demo.folder / "seconds-per-step").read_text())


@pytest.fixture
def waiting(demo):
    """A function that makes a demo of 60 steps whose newcomer still runs."""

    def made(*, came_in):
        swarm = demo(None, came_in=came_in, steps=60)
        swarm.joined_s = time.monotonic()
        return swarm

    return made


def test_the_peers_wait_for_a_newcomer_that_is_not_a_member(waiting):
    swarm = waiting(came_in=False)
    swarm.attend(HOLD_AT - 0.01)
    assert brake(swarm) == pytest.approx(MIN_RUN_S / 60)
    swarm.attend(HOLD_AT)
    assert brake(swarm) == math.inf
    assert swarm.news == ["training waits for the newcomer, which is not a member yet"]


def test_the_peers_train_slowly_until_a_round_has_included_the_newcomer(waiting):
    swarm = waiting(came_in=True)
    swarm.steps = 300  # a longer run, whose steps are faster than the slow ones
    look(swarm)
    swarm.attend(HOLD_AT)
    assert brake(swarm) == SLOW_STEP_S
    receipt(swarm, "a", "peer")
    look(swarm)
    swarm.attend(HOLD_AT)
    assert brake(swarm) == pytest.approx(MIN_RUN_S / 300)
    assert swarm.joined == 1


@pytest.mark.parametrize(
    ("came_in", "why"), [(False, "it did not get into the run"), (True, "no round included it")]
)
def test_the_wait_for_a_newcomer_ends_and_the_demo_says_what_it_lacks(waiting, came_in, why):
    swarm = waiting(came_in=came_in)
    look(swarm)
    swarm.attend(HOLD_AT)
    swarm.joined_s -= NEWCOMER_TIMEOUT_S
    swarm.attend(HOLD_AT)
    swarm.attend(HOLD_AT)
    assert brake(swarm) == pytest.approx(MIN_RUN_S / 60)
    (said,) = swarm.missing()
    assert said.startswith(f"newcomer is not counted: {why} within 90 s; see ")
    assert said in swarm.news


def test_a_newcomer_that_ended_delays_no_other_node(demo):
    swarm = demo(1, came_in=False, steps=60)
    swarm.joined_s = time.monotonic()
    swarm.attend(HOLD_AT)
    assert brake(swarm) == pytest.approx(MIN_RUN_S / 60)
    assert swarm.missing()[0].startswith("newcomer is not counted: it did not get into the run; ")


@pytest.mark.parametrize("case", [{"came_in": True}, {"came_in": False, "tokens": 60}])
def test_an_error_before_the_end_or_of_one_that_was_in_fails_the_demo(demo, case):
    with pytest.raises(Failure, match="newcomer ended with an error"):
        demo(1, **case).require_success()


def test_a_founder_that_ends_at_once_is_not_said_to_be_late(tmp_path, monkeypatch):
    process = SimpleNamespace(returncode=2, poll=lambda: 2)
    ended = Child("founder", tmp_path, process)
    monkeypatch.setattr(Demo, "start", lambda demo, name, arguments: ended)
    with pytest.raises(Failure, match="did not start: its process has ended with exit code 2;"):
        Demo(tmp_path, Path("run.toml"), 1, lambda moment: None).run()
