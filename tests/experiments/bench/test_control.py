"""Control is counted beside content that takes as long as whole shards, in rounds that complete."""

import itertools

import pytest

from farflock.experiments.bench import control
from farflock.experiments.measure.metric import NotMeasured
from farflock.swarm import batch, chunk_server, chunks
from farflock.swarm.frame import Frame, pack
from farflock.swarm.messages import Key, Piece
from farflock.swarm.protocol.exchange.streams import RoundOutcome
from farflock.swarm.sim.virtual_time import run_virtual


def test_each_swarm_has_its_bytes_beside_the_content_and_its_processor_time(quick):
    lines = list(itertools.islice(control.run(quick()), 4))
    names = ["control.2", "control.2.cpu", "control.4", "control.4.cpu"]
    assert [line.metric for line in lines] == names
    for said, core in zip(lines[::2], lines[1::2], strict=True):
        assert 0 < said.value < said.yardstick
        assert said.ratio == pytest.approx(said.value / said.yardstick, abs=1e-6)
        assert core.yardstick == control.MAX_CORE
        assert core.value > 0


def test_each_swarm_of_the_grid_has_its_signatures_and_what_they_take(quick):
    lines = {line.metric: line for line in control.run(quick("control.round"))}
    cells = [f"control.round.{cell}" for cell in ("2.1", "3.1", "2.8", "3.8")]
    assert list(lines) == [cell + part for cell in cells for part in control.PARTS]
    for said, signed, core, signing in (
        [lines[cell + part] for part in control.PARTS] for cell in cells
    ):
        assert 0 < signed.value < said.value < said.yardstick
        assert signed.yardstick == control.MAX_SIGNATURE_BYTES
        assert 0 < signing.value < core.value
        assert core.yardstick == signing.yardstick == control.MAX_CORE


def test_certificates_grow_with_the_members_all_of_which_vote():
    def signatures(members):
        with control.small_shards():
            cost = run_virtual(control.interval_cost(members, 1, 12.5e6))
        assert cost.interval_s == pytest.approx(control.INTERVAL_S, rel=0.01)
        # Each member checks the signatures of a quorum, but for its own.
        assert cost.each(cost.meter.remembered.checks) >= members // 2
        return cost.each(cost.meter.signatures.total())

    assert signatures(8) > 2 * signatures(3)


def test_a_swarm_in_which_not_all_vote_is_no_measurement():
    async def only_some_vote():
        swarm = control.Swarm(4, 1, 12.5e6)
        async with swarm.running():
            swarm.require_voters()

    with pytest.raises(NotMeasured, match="of 4 members vote"):
        run_virtual(only_some_vote())


def test_swarms_that_take_long_are_named_and_left_out(quick, monkeypatch):
    monkeypatch.setattr(control, "MAX_BY_DEFAULT", 16)
    lines = {line.metric: line.note for line in control.run(quick("control.round"))}
    assert "control.round.3.8" not in lines
    assert "by name, since they take long: control.round.3.8" in lines["control.round.2.8"]
    assert "by name" not in lines["control.round.3.1"]
    named = [line.metric for line in control.run(quick("control.round.3.8"))]
    assert named == [f"control.round.3.8{part}" for part in control.PARTS]


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
