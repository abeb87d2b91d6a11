"""Control is counted beside content that takes as long as whole shards, in rounds that complete."""

import pytest

from farflock.experiments.bench import control
from farflock.experiments.measure.metric import NotMeasured
from farflock.swarm import batch, chunk_server, chunks
from farflock.swarm.frame import Frame, pack
from farflock.swarm.messages import Key, Piece
from farflock.swarm.protocol.exchange.streams import RoundOutcome


def test_each_swarm_has_its_bytes_beside_the_content_and_its_processor_time(quick):
    lines = list(control.run(quick()))
    names = ["control.2", "control.2.cpu", "control.4", "control.4.cpu"]
    assert [line.metric for line in lines] == names
    for said, core in zip(lines[::2], lines[1::2], strict=True):
        assert 0 < said.value < said.yardstick
        assert said.ratio == pytest.approx(said.value / said.yardstick, abs=1e-6)
        assert core.yardstick == control.MAX_CORE
        assert core.value > 0


def test_only_what_was_asked_for_is_run(quick):
    assert {line.metric for line in control.run(quick("control.4"))} == {
        "control.4",
        "control.4.cpu",
    }


def test_a_small_shard_takes_the_line_as_long_as_a_whole_one():
    def frame_of(body):
        return pack(Frame(1, Piece(bytes(32), 0, len(body)), body))

    assert control.line_bytes(frame_of(bytes(control.SMALL_BYTES))) == control.SHARD_BYTES
    listed = frame_of(bytes(36 * 4))
    assert control.line_bytes(listed) == len(listed)


def test_fetches_are_as_before_afterwards():
    names = ("STALL_S", "GAP_S", "WINDOW_BYTES", "ASK_BYTES", "INBOUND_BYTES")
    timeout_s, before = chunk_server.SERVE_TIMEOUT_S, [getattr(chunks, name) for name in names]
    with control.small_shards():
        assert chunks.WINDOW_BYTES == 6 * control.SMALL_BYTES
        assert pytest.approx(before[1] * 16) == chunks.GAP_S
        assert pytest.approx(timeout_s * 16) == chunk_server.SERVE_TIMEOUT_S
        assert batch.SMALL_BYTES < control.SMALL_BYTES, "none comes in a batch, as no whole one"
    assert [getattr(chunks, name) for name in names] == before
    assert timeout_s == chunk_server.SERVE_TIMEOUT_S


def test_a_round_that_not_all_completed_is_no_measurement():
    whole, partial = (
        RoundOutcome(Key("weights", 0), status, 1, ("a", "b")) for status in ("ok", "partial")
    )
    control.require_complete([whole, whole], 2)
    with pytest.raises(NotMeasured, match="partial"):
        control.require_complete([whole, partial], 2)
