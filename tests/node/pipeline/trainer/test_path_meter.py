"""The held-out loss through scripted servers: which are asked, and what happens if one fails."""

import asyncio
import math
import struct

import numpy as np
import pytest
from worlds.trainer_world import LIFE, STAGES, TOKENS, World, honest, saying, silence

from farflock.node.model.evaluation import HeldOut, LossEstimate
from farflock.node.pipeline.passes.requests import (
    Busy,
    Done,
    Foreign,
    HeldOutForward,
    NotFinite,
    Refused,
    Stale,
    encode,
)
from farflock.node.pipeline.trainer import path_meter as module
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.path_meter import PathMeter
from farflock.swarm.peer.calls import NotFetched
from farflock.swarm.sim.virtual_time import run_virtual

COUNT = 5
MEAN = 2.0 + (COUNT - 1) / 2  # an honest last stage says 2 and the number of the microbatch
LAST = STAGES - 1


def measured(world, count=COUNT, together=2, moved=lambda percent: None):
    """What a meter of `count` sequences finds, with no trainer beside it; `moved` is told how far
    it is."""
    column = np.arange(count)[:, None] % 15  # of 16 tokens
    held_out = HeldOut(np.concatenate([column.repeat(TOKENS, 1), column + 1], 1))

    async def main():
        client = world.trainer.client
        meter = PathMeter(
            client, world, EdgeCodecs(world.edges, world.of), lambda: held_out, together
        )
        found = await meter.measure(moved)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found

    return run_virtual(main())


def mean(found):
    return found.estimate.mean


def asked(world, stage, number=0):
    entries = world.asked(HeldOutForward, stage=stage)
    return [entry for entry in entries if entry.request.number == number]


def test_each_microbatch_goes_through_all_stages_and_servers_take_turns():
    world = World()
    found = measured(world)
    assert found.estimate == LossEstimate(MEAN, pytest.approx(math.sqrt(2.5 / COUNT)), COUNT)
    assert found.tokens == COUNT * TOKENS
    assert len(world.log) == STAGES * COUNT
    for number in range(COUNT):
        for stage in range(STAGES):
            (entry,) = asked(world, stage, number)
            assert entry.peer == f"{stage}{'ab'[number % 2]}"
            assert (entry.request.source, entry.request.epoch) == (stage - 1, world.epoch)
            tokens, *rest = entry.payloads
            assert tokens == bytes([number]) * TOKENS
            middle = [b"out of %d" % (stage - 1)] * (stage > 0)
            targets = bytes([number] * (TOKENS - 1) + [number + 1])
            assert rest == middle + [targets] * (stage == LAST)
    assert world.most["calls"] == 2
    assert not world.results, "a path policy has heard of it"
    assert not world.events


def test_the_last_microbatch_is_filled_up_and_only_the_windows_count():
    world = World()
    object.__setattr__(world.edges, "batch", 2)
    said = lambda request: (  # noqa: E731
        encode(Done(LIFE)),
        (struct.pack("<dd", request.number, request.number + 0.5),),
    )
    for peer in ("2a", "2b"):
        world.script(peer, HeldOutForward, *[said] * 3)
    found = measured(world, 3)
    assert (mean(found), found.estimate.sequences) == ((0 + 0.5 + 1) / 3, 3)
    tokens = [entry.payloads[0] for entry in world.asked(HeldOutForward, stage=0)]
    assert sorted(tokens) == [bytes([0] * TOKENS + [1] * TOKENS), bytes([2] * 2 * TOKENS)]


FAILURES = {
    "silence": silence,
    "a refusal": saying(Refused("no")),
    "an unread codec": saying(Foreign(())),
    "no payload": saying(Done(LIFE)),
    "a wrong answer": lambda request: (b"nonsense", ()),
    "an output that is not finite": saying(NotFinite()),
}


@pytest.mark.parametrize("answer", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("stage", range(STAGES))
def test_another_server_is_asked_instead_of_one_that_fails(answer, stage):
    world = World()
    world.script(f"{stage}a", HeldOutForward, answer)
    found = measured(world)
    assert (mean(found), found.estimate.sequences) == (MEAN, COUNT)
    assert {entry.peer for entry in asked(world, stage)} == {f"{stage}a", f"{stage}b"}


def test_losses_of_another_number_of_sequences_are_not_taken():
    world = World()
    world.script("2a", HeldOutForward, saying(Done(LIFE), bytes(16)))
    assert mean(measured(world)) == MEAN
    assert len(asked(world, LAST)) == 2


def test_a_busy_server_is_asked_again():
    world = World()
    world.order[1] = ["1a"]
    world.script("1a", HeldOutForward, *[saying(Busy())] * 5)
    assert mean(measured(world, together=1)) == MEAN
    assert len(asked(world, 1)) == 6


def test_a_stage_that_stays_busy_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_TRIES", 4)
    world = World()
    for peer in ("1a", "1b"):
        world.script(peer, HeldOutForward, *[saying(Busy())] * 99)
    assert measured(world) is None


@pytest.mark.parametrize("stage", range(STAGES))
def test_without_a_server_of_a_stage_nothing_is_measured(stage):
    world = World()
    world.order[stage] = []
    assert measured(world) is None


def test_if_all_servers_refuse_nothing_is_measured_and_no_task_stays():
    world = World()
    for peer in ("2a", "2b"):
        world.script(peer, HeldOutForward, *[saying(Refused("no"))] * 99)
    assert measured(world, together=COUNT) is None


def test_if_all_servers_that_answer_say_so_the_loss_is_not_finite():
    world = World()
    for peer in ("1a", "1b"):
        world.script(peer, HeldOutForward, *[saying(NotFinite())] * COUNT)
    found = measured(world)
    assert math.isnan(mean(found))
    assert not world.asked(HeldOutForward, stage=LAST)


def test_a_walk_begins_again_where_its_codec_is_over_but_not_for_ever():
    world = World()
    world.script("1a", HeldOutForward, saying(Stale(7)))
    assert mean(measured(world, 1)) == 2.0
    assert [len(asked(world, stage)) for stage in range(STAGES)] == [2, 2, 1]
    world = World()
    for peer in ("1a", "1b"):
        world.script(peer, HeldOutForward, *[saying(Stale(7))] * 10)
    assert measured(world, 1) is None
    assert len(asked(world, 0)) == module.MAX_WALKS


def test_it_is_given_up_once_it_makes_no_progress(monkeypatch, caplog):
    monkeypatch.setattr(module, "STALLED_S", 3.0)
    world, told = World(forward_timeout_s=100.0), []
    world.script("1a", HeldOutForward, honest, silence)
    assert measured(world, together=1, moved=told.append) is None
    assert told == [0, 20, 40]
    assert "no hundredth of it was measured within 3 s" in caplog.text


def test_it_takes_as_long_as_it_makes_progress(monkeypatch):
    monkeypatch.setattr(module, "STALLED_S", 3.0)
    world, told = World(forward_timeout_s=2.0), []
    world.script("1a", HeldOutForward, *[silence] * COUNT)

    def moved(percent):
        told.append((percent, asyncio.get_running_loop().time()))

    assert mean(measured(world, together=1, moved=moved)) == MEAN
    assert [percent for percent, _ in told] == [0, 20, 40, 60, 80]
    assert told[-1][1] > 4.0


def test_of_many_microbatches_each_hundredth_is_told_once():
    told = []
    measured(World(), 250, together=8, moved=told.append)
    assert told == list(range(100))


def test_payloads_that_stay_with_their_makers_are_dropped_in_the_end():
    world = World()
    world.stays = True
    assert mean(measured(world)) == MEAN
    entries = world.asked(HeldOutForward, stage=1)
    assert all(len(entry.payloads[1].holders) == 1 for entry in entries)
    assert not world.here
    leaves = {
        entry.request.stage: leave for entry, leave in zip(world.log, world.leaves, strict=True)
    }
    assert leaves == {0: True, 1: True, 2: False}


def test_a_payload_that_its_server_cannot_get_goes_through_this_node_or_the_walk_begins_again():
    world = World()
    world.stays, lost = True, []

    def cannot_fetch(request):
        raise NotFetched("1a", [1])

    world.script("1a", HeldOutForward, cannot_fetch)
    assert mean(measured(world, 1)) == 2.0
    assert len(world.fetched) == 1
    assert [len(asked(world, stage)) for stage in range(STAGES)] == [1, 2, 1]
    assert asked(world, 1)[1].payloads[1] == b"out of 0"

    def loses(request):
        lost.append(world.asked(HeldOutForward, stage=1)[-1].payloads[1])
        world.lost.add(lost[0].call)
        raise NotFetched("1a", [1])

    world.log.clear()
    world.script("1a", HeldOutForward, loses)
    assert mean(measured(world, 1)) == 2.0
    assert [len(asked(world, stage)) for stage in range(STAGES)] == [2, 2, 1]
    assert not world.here
