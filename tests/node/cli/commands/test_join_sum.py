"""A dry run says how long a newcomer's download takes beside the rounds, and when it never ends."""

import pytest

from farflock.node.cli.commands.join_sum import join_facts, join_text
from farflock.node.run.manifest import resolve
from farflock.node.train.run_size import stream_sizes

RATE = 200_000.0
WHOLE = {"model": {"preset": "tiny"}, "data": {"corpus": "shakespeare"}}
PIPELINE = WHOLE | {"model": {"preset": "tiny", "tied": False}, "pipeline": {"stages": 2}}


def facts(described, step_s, members=2):
    manifest = resolve(described)
    streams = stream_sizes(manifest.plan(), manifest.pipeline_plan())
    return join_facts(manifest, streams, members, RATE, step_s), streams


def test_what_is_left_of_the_line_carries_the_state_and_the_rounds_of_that_time():
    found, (stream,) = facts(WHOLE, step_s=1.0)
    period_s = stream.steps * 1.0
    share = stream.sent_bytes(2) / (RATE * period_s)
    assert found["rounds_share"] == pytest.approx(share)
    assert found["alone_s"] == found["state_bytes"] / RATE
    assert found["join_s"] == pytest.approx(found["alone_s"] / (1 - share))
    carried = RATE * found["join_s"]
    rounds = found["join_s"] / period_s
    assert carried == pytest.approx(found["state_bytes"] + rounds * stream.sent_bytes(2))


def test_rounds_that_fill_the_line_leave_nothing():
    found, _ = facts(WHOLE, step_s=1e-6)
    assert (found["rounds_share"], found["join_s"]) == (pytest.approx(1.0), None)
    assert join_text(found).endswith("or a faster line")


def test_of_a_pipeline_the_stage_that_takes_longest_counts():
    untied = WHOLE | {"model": PIPELINE["model"]}
    (whole, _), (stage, streams) = facts(untied, 1.0), facts(PIPELINE, 1.0)
    assert len(streams) == 2
    assert 0.4 < stage["state_bytes"] / whole["state_bytes"] < 1.0


@pytest.mark.parametrize(
    ("share", "join_s", "said"),
    [
        (0.0, 430.0, "join       86.0 MB of state: 0:07:10 on this line"),
        (0.2, 537.5, "0:07:10 on this line, 0:08:58 beside rounds, which take 20% of it"),
        (0.6, 1075.0, "which take 60% of it; a longer period or a coarser codec would leave more"),
        (0.95, 8600.0, "rounds take 95% of this line, so a newcomer would hardly ever catch up"),
    ],
)
def test_the_sum_is_said_with_what_would_help(share, join_s, said):
    sums = {"state_bytes": 86_000_000, "rounds_share": share, "alone_s": 430.0, "join_s": join_s}
    assert said in join_text(sums)
