"""A trainer whose servers do not all read the same codecs."""

from worlds.trainer_world import saying, trained

from farflock.node.pipeline.passes.requests import Backward, Foreign, Forward, encode
from farflock.node.pipeline.trainer.walker import ATTEMPTS_PER_SERVER
from farflock.swarm.messages import CodecId

RAW, INT8 = CodecId("raw,raw", 1), CodecId("int8,int8", 1)


def ways(entries):
    """The codecs that each request names, by stage."""
    return {entry.request.stage: (entry.request.came, entry.request.sends) for entry in entries}


@trained(others=("int8",))
async def test_each_pass_says_what_its_payloads_are_in_and_its_way_back_goes_as_it_came(world):
    world.reads = {"0a": (RAW, INT8), "1a": (RAW, INT8), "1b": (INT8,), "2a": (RAW, INT8)}
    world.order[0] = ["0a"]
    await world.merged()
    assert ways(world.asked(Forward)) == {0: (None, INT8), 1: (INT8, INT8)}
    assert ways(world.asked(Backward)) == {2: (INT8, None), 1: (INT8, INT8), 0: (None, INT8)}


@trained(others=("int8",))
async def test_without_an_older_release_the_preferred_codec_is_taken(world):
    world.reads = {peer: (RAW, INT8) for peers in world.order.values() for peer in peers}
    await world.merged()
    assert ways(world.asked(Forward)) == {0: (None, RAW), 1: (RAW, RAW)}


@trained()
async def test_a_server_that_cannot_read_a_codec_is_not_asked(world):
    world.reads = {"1a": (INT8,), "1b": (RAW,), "2a": (INT8,), "2b": (RAW,)}
    await world.merged()
    assert {entry.peer for entry in world.asked(Forward, Backward)} == {"0a", "1b", "2b"}


@trained(others=("int8",))
async def test_what_a_stage_cannot_read_starts_again_in_a_codec_that_it_can(world):
    def foreign(request):
        world.reads |= {"1a": (INT8,), "1b": (INT8,)}
        return (encode(Foreign((INT8,))),)

    world.script("1a", Forward, foreign)
    await world.merged()
    said = [
        (entry.request.stage, entry.request.came, entry.request.sends)
        for entry in world.asked(Forward)
    ]
    assert said == [(0, None, RAW), (1, RAW, RAW), (0, None, INT8), (1, INT8, INT8)]


def test_what_no_server_can_read_on_the_way_back_is_dropped_at_the_stages_that_it_cannot_reach():
    @trained()
    async def main(world):
        foreign = saying(Foreign((INT8,)))
        for peer in ("1a", "1b"):
            world.script(peer, Backward, *[foreign] * ATTEMPTS_PER_SERVER)
        await world.until(lambda: world.trainer.commits.dropped)
        assert len(world.asked(Backward, stage=1)) == 2 * ATTEMPTS_PER_SERVER, (
            "each of both was asked again"
        )
        assert [event for event in world.events if event[0] == "dropped"] == [("dropped", 0)] * 2

    main()


@trained()
async def test_one_server_that_cannot_read_it_costs_an_attempt(world):
    world.script("1a", Backward, saying(Foreign((INT8,))))
    await world.merged()
    assert world.trainer.commits.dropped == 0
    assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b"]
