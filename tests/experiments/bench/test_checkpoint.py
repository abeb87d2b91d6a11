"""A node that is alone trains while checkpoints are written, and its steps are told apart."""

import math

import pytest

from farflock.experiments.bench import checkpoint
from farflock.experiments.measure.metric import NotMeasured, Options
from farflock.node.model.llama import PRESETS


@pytest.mark.net
@pytest.mark.ci_more
@pytest.mark.usefixtures("forked")
def test_the_stall_and_the_time_of_checkpoints(quick):
    stall, write = checkpoint.run(quick())
    size = PRESETS["demo"].parameters()
    assert [stall.metric, write.metric] == [f"checkpoint.stall.{size}", f"checkpoint.{size}"]
    assert stall.yardstick == checkpoint.ALLOWED_STALL_MS
    assert 0 < stall.value < math.inf
    assert stall.n == write.n == 2
    assert write.yardstick > 0
    assert write.value > 0


def test_a_model_that_fits_no_size_is_refused():
    with pytest.raises(NotMeasured, match=r"one of 123\.6m, 308\.5m parameters"):
        list(checkpoint.run(Options(parameters=1_200_000_000)))


def step(kind, between_s=0.0, saving_s=0.0, step_s=1.0):
    return {"kind": kind, "between_s": between_s, "saving_s": saving_s, "step_s": step_s}


def test_a_stall_is_the_longest_of_each_checkpoint_above_other_steps():
    quiet, lines = step("quiet", 0.002), []
    for longest_s in (0.012, 0.022, 0.072):
        lines += [quiet, quiet, step("writing", longest_s - 0.001, 0.001), step("writing", 0.004)]
        lines.append({"kind": "checkpoint", "seconds": 3.0, "bytes": 6e6})
    lines += [quiet, {"kind": "plain", "seconds": 1.5}]
    assert [len(steps) for steps in checkpoint.stretches(lines)] == [2, 2, 2]
    stall = checkpoint.stall("checkpoint.stall.1m", lines)
    assert stall.value == pytest.approx(20.0)
    assert stall.ratio == pytest.approx(0.4)
    assert "worst 70.0; the cut 71.0, copies and waits 1.0 at most" in stall.note
    write = checkpoint.duration("checkpoint.1m", lines)
    assert (write.value, write.ratio, write.note) == (3.0, 2.0, "6.0 MB")
