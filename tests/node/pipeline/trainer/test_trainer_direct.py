"""A trainer whose payloads stay with the servers that made them: what it hands on, what it fetches
itself, and how it meets the loss of one."""

import asyncio

import pytest
from worlds.trainer_world import EPOCH, LIFE, STAGES, stages_of, trained

from farflock.node.pipeline.passes.requests import Backward, Confirm, Forward
from farflock.node.pipeline.trainer.stage_client import PAUSE_S
from farflock.swarm.peer.calls.calls import NotFetched
from farflock.swarm.peer.calls.payloads import Left


def missing(*places):
    def say(request):
        raise NotFetched("server", places)

    return say


def direct(main):
    async def staying(world):
        world.stays = True
        await main(world)

    staying.__doc__ = main.__doc__
    return trained()(staying)


def held_of(world, entry, place):
    """Return the bytes of a payload that a request names."""
    payload = entry.payloads[place]
    assert isinstance(payload, Left)
    return world.here[payload.call]


@direct
async def test_payloads_stay_where_they_are_made_until_their_microbatch_counts(world):
    await world.merged()
    first, second = world.asked(Forward)
    assert held_of(world, second, 1) == b"out of 0"
    last, middle, end = world.asked(Backward)
    assert held_of(world, last, 1) == b"out of 1"
    assert (held_of(world, middle, 1), held_of(world, middle, 2)) == (b"out of 0", b"gradient of 2")
    assert held_of(world, end, 1) == b"gradient of 1"
    assert {type(entry.payloads[0]) for entry in (first, second, last, middle, end)} == {bytes}
    assert middle.payloads[1].holders == ("0a", "1a"), "its maker, and the server that read it"
    kept = set(world.here)
    assert len(kept) == 4
    assert not world.fetched
    await world.close(0)
    assert not kept & set(world.here)


@pytest.mark.parametrize(
    ("terms", "leaves"),
    [({}, True), ({"direct": False}, False), ({"codec": "topk:1/4,mask"}, False)],
    ids=["by default", "switched off", "a codec whose gradients need the activation"],
)
def test_payloads_stay_only_where_the_run_and_the_codec_allow_it(terms, leaves):
    @trained(**terms)
    async def main(world):
        await world.until(lambda: world.asked(Forward, stage=1))
        assert set(world.leaves) == {leaves}

    main()


@direct
async def test_what_a_server_cannot_fetch_comes_through_the_trainer(world):
    world.script("1a", Forward, missing(1))
    world.script("1b", Backward, missing(2))
    await world.merged()
    first, second = world.asked(Forward, stage=1)
    assert isinstance(first.payloads[1], Left)
    assert second.payloads[1] == b"out of 0"
    first, second = world.asked(Backward, stage=1)
    assert second.payloads[2] == b"gradient of 2"
    assert [entry.request.attempt for entry in (first, second)] == [1, 2]
    assert len(world.fetched) == 2
    assert not [name for name, _ in world.events if name in ("shunned", "dropped")]
    assert len(world.asked(Forward, Backward)) == 2 + 3 + 2


@direct
async def test_a_server_that_says_nonsense_of_what_is_missing_gets_everything(world):
    world.script("1a", Backward, missing(0, 7))
    world.script("0a", Forward, missing(1))
    await world.merged()
    assert len(world.asked(Forward, stage=0)) == 2
    _, second = world.asked(Backward, stage=1)
    assert second.payloads[1:] == (b"out of 0", b"gradient of 2")


@pytest.mark.parametrize("alive", [True, False])
def test_an_input_that_is_lost_on_the_way_is_made_again_and_nothing_before_it(alive):
    @direct
    async def main(world):
        def lose(request):
            (left,) = (call for call, payload in world.here.items() if payload == b"out of 1")
            world.lost.add(left)
            if not alive:
                world.order[1] = ["1b"]
            return missing(1)(request)

        world.script("2a", Backward, lose)
        await world.merged()
        assert stages_of(world.asked(Forward)) == [0, 1, 1]
        assert {entry.request.epoch for entry in world.asked(Forward)} == {EPOCH}
        assert world.asked(Forward)[-1].peer == "1b", "the maker lives and does not deliver"
        assert [name for name, _ in world.events if name == "shunned"] == ["shunned"] * alive
        assert stages_of(world.asked(Backward)) == [2, 2, 1, 0]
        await world.close(0)
        assert ("microbatch", 0) in world.events
        assert ("dropped", 0) not in world.events

    main()


@direct
async def test_an_input_and_the_one_before_that_are_both_made_again(world):
    def lose(request):
        world.lost |= set(world.here)
        return missing(1)(request)

    world.script("2a", Backward, lose)
    world.script("1b", Forward, missing(1))
    await world.merged()
    assert stages_of(world.asked(Forward)) == [0, 1, 1, 0, 1]


def gradient_lost(world):
    def lose(request):
        (left,) = (call for call, payload in world.here.items() if payload == b"gradient of 2")
        world.lost.add(left)
        return missing(2)(request)

    world.script("1a", Backward, lose)
    return world.until(lambda: world.lost)


@direct
async def test_a_gradient_that_is_lost_with_its_maker_is_made_again_once_that_has_left(world):
    await gradient_lost(world)
    await asyncio.sleep(10 * PAUSE_S)
    assert len(world.asked(Backward, stage=1)) == 1, "there is nothing to ask for"
    world.order[2] = ["2b"]
    world.gone.append((2, f"2a/{LIFE}"))
    await world.merged(STAGES + 1)
    assert stages_of(world.asked(Backward)) == [2, 1, 2, 1, 0]
    assert world.asked(Confirm)[1].peer == "2b"
    await world.close(0)
    assert ("microbatch", 0) in world.events


@direct
async def test_a_gradient_that_is_lost_after_its_maker_was_counted_costs_the_rest_and_no_hang(
    world,
):
    await gradient_lost(world)
    await world.close(0, stages=(2,))
    await world.until(lambda: world.trainer.source.begun == 2, 5.0)
    assert world.events.count(("dropped", 0)) == 2
    assert world.trainer.commits.lost == 0
    assert {entry.request.number for entry in world.asked(Backward, stage=0)} <= {1}


@direct
async def test_an_input_that_is_lost_after_the_microbatch_counts_somewhere_costs_the_rest(world):
    def lose(request):
        (left,) = (call for call, payload in world.here.items() if payload == b"out of 0")
        world.lost.add(left)
        return missing(1)(request)

    world.script("1a", Backward, lose)
    await world.until(lambda: ("dropped", 0) in world.events)
    await world.close(0, stages=(2,))
    await world.until(lambda: world.trainer.source.begun == 2, 5.0)
    assert world.events.count(("dropped", 0)) == 2
    assert stages_of(entry for entry in world.asked(Confirm) if entry.request.number == 0) == [2]
