"""A trainer among scripted servers: what it asks of each, and how it meets silence and loss."""

import asyncio
import itertools

import pytest
from worlds.trainer_world import (
    CALL_S,
    EPOCH,
    LIFE,
    STAGES,
    TOKENS,
    World,
    saying,
    silence,
    stages_of,
    trained,
)

from farflock.node.pipeline.passes.requests import (
    Backward,
    Busy,
    Confirm,
    Done,
    Forward,
    Refused,
    Revoke,
    Stale,
    Unknown,
    encode,
)
from farflock.node.pipeline.trainer.stage_client import CONFIRM_TIMEOUT_S, PAUSE_S
from farflock.node.run.terms import TrainerTerms
from farflock.swarm.protocol.allowance import Allowance
from farflock.swarm.sim.virtual_time import run_virtual


@trained()
async def test_a_microbatch_goes_forward_and_back_is_confirmed_and_is_over_when_all_stages_name_it(
    world,
):
    await world.merged()
    assert world.trainer.inputs.counts == {}
    assert stages_of(world.asked(Forward)) == [0, 1], (
        "the last stage's own pass is part of its way back"
    )
    assert stages_of(world.asked(Backward)) == [2, 1, 0]
    assert sorted(stages_of(world.asked(Confirm))) == [0, 1, 2]
    assert {entry.request.epoch for entry in world.asked(Forward, Backward)} == {EPOCH}
    assert [entry.request.source for entry in world.asked(Forward, Backward)] == [-1, 0, 1, 0, -1]
    assert world.trainer.commits.recent_loss == 8.0 / TOKENS
    await world.close(0, stages=(0, 1))
    assert world.trainer.kept == 1
    await world.close(0, stages=(2,))
    assert ("microbatch", 0) in world.events
    assert world.trainer.source.begun == 2


@trained(kept=9)
async def test_the_next_microbatch_begins_when_a_walk_ends_and_not_with_the_next_tick(world):
    begun_s = []
    draw, now = world.trainer.source.draw, asyncio.get_running_loop().time
    world.trainer.source.draw = lambda epoch: begun_s.append(now()) or draw(epoch)
    await world.until(lambda: len(begun_s) == 5)
    walk_s = 5 * CALL_S  # two forward passes and three backward ones
    apart_s = [after - before for before, after in itertools.pairwise(begun_s)]
    assert apart_s == pytest.approx([walk_s] * 4)


@trained(kept=9, allowance=Allowance(2, 2))
async def test_no_more_begin_while_too_many_wait_for_a_round_and_rounds_of_others_count(world):
    source = world.trainer.source
    await world.until(lambda: source.begun == 2)
    await asyncio.sleep(20 * CALL_S)
    assert (source.begun, world.trainer.walking) == (2, 0)
    await world.close(0)
    await world.until(lambda: source.begun == 4)
    others = [("u", number) for number in range(4)]
    world.closed += [(stage, [("t", 1), *others]) for stage in range(STAGES)]
    await asyncio.sleep(20 * CALL_S)
    assert source.begun == 4, "a round of 5 where 2 belong: the allowance of 3 is 1.2 now"


@trained()
async def test_each_pass_gets_what_it_needs_and_nothing_else(world):
    await world.merged()
    tokens, targets = bytes([0]) * TOKENS, bytes([1]) * TOKENS
    assert [entry.payloads for entry in world.asked(Forward)] == [(tokens,), (tokens, b"out of 0")]
    assert [entry.payloads for entry in world.asked(Backward)] == [
        (tokens, b"out of 1", targets),
        (tokens, b"out of 0", b"gradient of 2"),
        (tokens, b"gradient of 1"),
    ]
    assert {entry.payloads for entry in world.asked(Confirm)} == {()}


@trained()
async def test_rounds_that_name_other_trainers_microbatches_end_none_of_mine(world):
    await world.merged()
    world.closed += [(stage, [("u", 0), ("t", 99)]) for stage in range(STAGES)]
    await asyncio.sleep(0.5)
    assert world.trainer.kept == 1
    assert world.events == [("loss", 0)]


def test_a_microbatch_that_a_stage_finds_too_old_starts_again_in_a_newer_round():
    @trained()
    async def main(world):
        def stale(request):
            world.epoch = EPOCH + 3
            return (encode(Stale(EPOCH + 3)),)

        world.script("1a", Forward, stale)
        await world.merged()
        assert [(entry.request.stage, entry.request.epoch) for entry in world.asked(Forward)] == [
            (0, EPOCH),
            (1, EPOCH),
            (0, EPOCH + 3),
            (1, EPOCH + 3),
        ]
        assert {entry.request.epoch for entry in world.asked(Backward)} == {EPOCH + 3}

    main()


NOTHING_CAME = {
    "silence": silence,
    "no room": saying(Busy()),
    "a refusal": saying(Refused("no")),
    "nonsense": lambda request: (b"\xc1",),
    "too few payloads": saying(Done(LIFE, 1)),
    "too many payloads": saying(Done(LIFE, 1), b"a", b"b"),
}


@pytest.mark.parametrize("answer", NOTHING_CAME.values(), ids=NOTHING_CAME.keys())
@pytest.mark.parametrize("kind", [Forward, Backward])
def test_a_server_that_brings_nothing_is_passed_by(kind, answer):
    @trained()
    async def main(world):
        world.script("1a", kind, answer)
        await world.merged()
        asked = world.asked(kind, stage=1)
        assert asked[0].payloads == asked[1].payloads
        assert len(asked) == 2
        assert len(world.asked(kind)) == (3 if kind is Forward else 4), (
            "the other stages are asked once"
        )
        if kind is Backward:
            assert [entry.request.attempt for entry in asked] == [1, 2]

    main()


@trained()
async def test_after_silence_another_server_is_asked_and_only_its_gradient_is_confirmed(world):
    world.script("1a", Backward, silence)
    await world.merged()
    assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b"]
    assert [(entry.peer, entry.request.attempt) for entry in world.asked(Confirm, stage=1)] == [
        ("1b", 2)
    ]
    assert ("1a", "deadline", 2.5) in world.results


@trained()
async def test_what_another_life_of_the_server_answers_counts_for_nothing(world):
    world.script("1a", Backward, saying(Done(LIFE + 1, 1), b"gradient of 1"))
    await world.merged()
    assert [entry.request.attempt for entry in world.asked(Backward, stage=1)] == [1, 2]
    assert [entry.request.attempt for entry in world.asked(Confirm, stage=1)] == [2]


@trained()
async def test_a_late_answer_under_an_earlier_attempt_is_revoked_and_not_used(world):
    world.script("1a", Backward, silence, saying(Done(LIFE, 1), b"old"))
    world.order[1] = ["1a"]
    await world.merged()
    assert [entry.request.attempt for entry in world.asked(Backward, stage=1)] == [1, 2, 3]
    (revoked,) = world.asked(Revoke)
    assert (revoked.peer, revoked.request) == ("1a", Revoke(0, 1, 1))
    assert [entry.request.attempt for entry in world.asked(Confirm, stage=1)] == [3]
    assert world.asked(Backward, stage=0)[0].payloads[1] == b"gradient of 1"


@trained()
async def test_a_confirmation_is_repeated_till_it_is_answered_and_not_after_that(world):
    world.script("1a", Confirm, silence, saying(Busy()), silence)
    await world.merged(STAGES + 3)
    assert [entry.peer for entry in world.asked(Confirm, stage=1)] == ["1a"] * 4
    await asyncio.sleep(3 * CONFIRM_TIMEOUT_S)
    assert len(world.asked(Confirm)) == STAGES + 3
    assert len(world.asked(Backward)) == STAGES
    assert {size for peer, _, size in world.results} == {1.0, 2.5}, (
        "a confirmation says nothing of a server's speed"
    )


@trained()
async def test_what_a_server_does_not_have_any_more_is_asked_for_again_and_the_rest_is_not(world):
    world.script("1a", Confirm, saying(Unknown()))
    await world.merged(STAGES + 1)
    asked = world.asked(Backward, stage=1)
    assert [entry.request.attempt for entry in asked] == [1, 3], (
        "nothing that is still on its way counts"
    )
    assert asked[0].payloads == asked[1].payloads
    assert asked[0].request.epoch == asked[1].request.epoch
    assert len(world.asked(Forward, Backward)) == 2 + 3 + 1
    assert world.asked(Confirm, stage=1)[-1].request.attempt == 3


@pytest.mark.parametrize("stage", range(STAGES))
def test_what_was_merged_at_a_server_that_left_is_asked_of_another_one(stage):
    @trained()
    async def main(world):
        await world.merged()
        world.order[stage] = [f"{stage}b"]
        world.gone.append((stage, f"{stage}a/{LIFE}"))
        await world.merged(STAGES + 1)
        asked = world.asked(Backward, stage=stage)
        assert [entry.peer for entry in asked] == [f"{stage}a", f"{stage}b"]
        assert asked[0].payloads == asked[1].payloads
        assert len(world.asked(Forward, Backward)) == 2 + 3 + 1
        assert world.asked(Confirm)[-1].peer == f"{stage}b"
        await world.close(0)
        assert ("microbatch", 0) in world.events

    main()


@trained()
async def test_what_a_round_named_before_its_server_left_is_not_asked_again(world):
    await world.merged()
    world.closed.append((1, [("t", 0)]))
    world.gone.append((1, f"1a/{LIFE}"))
    await asyncio.sleep(1.0)
    assert len(world.asked(Backward)) == STAGES


@trained()
async def test_a_gone_server_confirms_nothing_and_its_last_rounds_are_waited_for(
    world,
):
    world.script("1a", Confirm, silence)
    await world.until(lambda: world.asked(Confirm, stage=1))
    world.order[1] = ["1b"]
    await asyncio.sleep(3 * CONFIRM_TIMEOUT_S)
    assert len(world.asked(Confirm, stage=1)) == 1
    assert len(world.asked(Backward, stage=1)) == 1
    world.gone.append((1, f"1a/{LIFE}"))
    await world.until(lambda: len(world.asked(Confirm, stage=1)) == 2)
    assert world.asked(Confirm, stage=1)[-1].peer == "1b"


@trained()
async def test_it_waits_until_a_stage_has_a_server(world):
    world.order[1] = []
    await asyncio.sleep(20 * PAUSE_S)
    assert stages_of(world.log) == [0]
    world.order[1] = ["1b"]
    await world.merged()
    assert len(world.asked(Forward)) == 2


@trained()
async def test_what_may_count_or_not_because_rounds_were_missed_is_given_up_and_counted(world):
    await world.merged()
    await world.close(0, stages=(0, 2))
    world.doubtful.append(1)
    await world.until(lambda: ("microbatch", 0) in world.events, 1.0)
    assert world.trainer.commits.lost == 1
    assert len(world.asked(Backward, stage=1)) == 1


@trained(window=3, kept=7)
async def test_microbatches_in_flight_and_microbatches_kept_are_bounded(world):
    most = 0
    for _ in range(200):
        await asyncio.sleep(0.03)
        walking = world.trainer.walking
        most = max(most, walking)
        assert walking <= 3
        assert world.trainer.kept <= 7
    assert (most, world.trainer.kept, world.trainer.source.begun) == (3, 7, 7)
    assert world.most["calls"] <= 3 + 7 * STAGES
    await world.close(0, 1, 2)
    await asyncio.sleep(2.0)
    assert world.trainer.source.begun == 10


@trained(window=4, kept=16)
async def test_over_many_microbatches_nothing_grows(world):
    for _ in range(40):
        done = world.trainer.source.begun
        await asyncio.sleep(0.6)
        await world.close(*range(max(done - 16, 0), done))
    trainer = world.trainer
    assert trainer.source.begun > 80
    assert trainer.kept <= 16
    assert len(trainer.commits.ledger) <= 16 * STAGES
    assert trainer.tasks <= 4 + 16 * STAGES
    assert sum(len(flight.asking) for flight in trainer._flights.values()) <= 16 * STAGES
    assert world.trainer.commits.lost == 0


def test_a_fault_of_our_own_ends_the_trainer_loudly():
    async def main():
        world = World()

        def broken(number):
            raise ZeroDivisionError("a bug")

        world.batch = broken
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(world.trainer.run(lambda: False), 5.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_it_ends_when_there_is_enough():
    async def main():
        world = World()
        await asyncio.wait_for(world.trainer.run(lambda: world.trainer.kept > 0), 5.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


@pytest.mark.parametrize(("window", "kept"), [(0, 4), (5, 4)])
def test_a_window_that_is_empty_or_does_not_fit_is_refused(window, kept):
    with pytest.raises(ValueError, match="window"):
        TrainerTerms(window=window, kept=kept)
