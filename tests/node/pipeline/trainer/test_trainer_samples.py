"""A trainer whose codec remembers samples."""

import asyncio

import pytest
from worlds.trainer_world import CALL_S, LIFE, STAGES, Order, saying, silence, stages_of, trained

from farflock.compression.aqsgd import DIFFERENCE, HELD, KEPT
from farflock.node.pipeline.passes.requests import Backward, Busy, Done, Forward, Lacks, Refused
from farflock.node.pipeline.trainer.stage_client import PAUSE_S

AQSGD = {"codec": "aqsgd8,fp32", "kept": 9}


def kinds(world, kind, number):
    """In which kinds the inputs of this microbatch went, by stage, as often as they were sent."""
    asked = [
        entry
        for entry in world.asked(kind)
        if entry.request.number == number and entry.request.stage
    ]
    return [(entry.request.stage, entry.payloads[1][0]) for entry in asked]


@trained(**AQSGD)
async def test_the_first_visit_of_a_sample_goes_whole_and_later_ones_as_what_changed(world):
    await world.merged(4 * STAGES)
    assert [kinds(world, Forward, number) for number in (0, 1)] == [[(1, KEPT)]] * 2
    assert kinds(world, Backward, 0) == [(2, KEPT), (1, HELD)]
    assert kinds(world, Forward, 2) == [(1, DIFFERENCE)]
    assert kinds(world, Backward, 3) == [(2, DIFFERENCE), (1, HELD)]
    first, third = (world.asked(Forward, stage=0)[number].request.visit for number in (0, 2))
    assert (first.samples, first.held) == ((0,), bytes(8))
    assert third.held == world.asked(Forward, stage=1)[0].payloads[1][9:17], (
        "the tag of what came then"
    )
    assert all(entry.request.visit.held == b"" for entry in world.asked(Backward))
    visits = world.trainer.inputs.counts
    assert (visits["whole samples"], visits["not held"]) == (4, 0), "two samples, out of two stages"
    assert visits["differences"] >= 4


def test_a_server_that_lacks_what_is_meant_gets_it_whole_at_once_and_later_the_change_again():
    @trained(**AQSGD)
    async def main(world):
        world.order = Order({stage: [f"{stage}a"] for stage in range(STAGES)})

        async def train(count):
            """Train as many microbatches in all; no other begins before the servers forget."""
            world.trainer.may_begin = lambda: world.trainer.source.begun < count
            await world.merged(count * STAGES)

        await train(2)
        world.memories.pop("1a")
        await train(6)
        assert kinds(world, Forward, 2) == [(1, DIFFERENCE), (1, KEPT)]
        assert kinds(world, Backward, 2) == [(2, KEPT), (1, HELD)], (
            "1a has forgotten what it sent, too"
        )
        assert kinds(world, Forward, 4) == [(1, DIFFERENCE)]
        world.memories.pop("2a")
        await train(8)
        assert kinds(world, Backward, 6) == [(2, DIFFERENCE), (2, KEPT), (1, HELD)]
        attempts = [
            entry.request.attempt
            for entry in world.asked(Backward, stage=2)
            if entry.request.number == 6
        ]
        assert attempts == [1, 2], "another attempt"

    main()


def test_a_server_that_lacks_a_row_sent_whole_is_not_asked_again_at_once():
    @trained(**AQSGD)
    async def main(world):
        lacking = saying(Lacks((0,)))
        world.order[1] = ["1a"]
        world.script("1a", Forward, *[lacking] * 20)
        await asyncio.sleep(3.0)
        assert 5 <= len(world.asked(Forward, stage=1)) <= 3.0 / (PAUSE_S + CALL_S) + 1
        assert {entry.payloads[1][0] for entry in world.asked(Forward, stage=1)} == {KEPT}

    main()


@pytest.mark.parametrize(
    "bad", [b"", bytes([HELD]) + bytes(16), bytes([DIFFERENCE]) + bytes(100), bytes(3000)]
)
def test_an_output_that_no_encoder_writes_is_asked_for_again(bad):
    @trained(**AQSGD)
    async def main(world):
        world.script("0a", Forward, saying(Done(LIFE), bad))
        await world.merged()
        assert stages_of(world.asked(Forward))[:3] == [0, 0, 1]

    main()


def test_a_server_that_is_busy_is_known_to_hold_what_it_held():
    @trained(**AQSGD)
    async def main(world):
        world.order = Order({stage: [f"{stage}a"] for stage in range(STAGES)})
        await world.merged(2 * STAGES)
        world.script("2a", Backward, saying(Busy()), saying(Busy()), silence)
        await world.merged(3 * STAGES)
        assert kinds(world, Backward, 2) == [(2, DIFFERENCE)] * 4 + [(1, HELD)]

    main()


def test_another_server_gets_the_same_activation_whole_also_for_a_backward_pass_alone():
    @trained(**AQSGD)
    async def main(world):
        world.script("1a", Backward, saying(Refused("no")))
        await world.merged()
        asked = [
            (entry.peer, entry.payloads[1]) for entry in world.asked(Forward, Backward, stage=1)
        ]
        assert [(peer, payload[0]) for peer, payload in asked[:3]] == [
            ("1a", KEPT),
            ("1a", HELD),
            ("1b", KEPT),
        ]
        assert asked[0][1] == asked[2][1]

    main()
