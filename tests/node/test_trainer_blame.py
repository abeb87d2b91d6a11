"""A trainer with servers that write unreadable messages, or that say so of others."""

import asyncio

import pytest
from worlds.trainer_world import LIFE, STAGES, honest, saying, stages_of, trained

from farflock.node.pipeline.passes.requests import (
    Backward,
    Done,
    Forward,
    Refused,
    decode_request,
    encode,
)
from farflock.node.pipeline.trainer.blame import QUARANTINE_S

INPUT, GRADIENT = (saying(Refused("nonsense", made)) for made in ("input", "gradient"))


def peers_of(entries):
    return [entry.peer for entry in entries]


@trained()
async def test_an_input_that_two_servers_cannot_read_is_made_again_by_another_server(world):
    for peer in ("1a", "1b"):
        world.script(peer, Forward, INPUT)
    await world.merged()
    assert peers_of(world.asked(Forward)) == ["0a", "1a", "1b", "0b", "1a"]
    assert ("shunned", 0) in world.events
    assert world.trainer.commits.dropped == 0


@trained()
async def test_of_the_last_stage_too_whose_only_pass_is_backward(world):
    for peer in ("2a", "2b"):
        world.script(peer, Backward, INPUT)
    await world.merged()
    assert peers_of(world.asked(Forward)) == ["0a", "1a", "0a", "1b"]
    assert peers_of(world.asked(Backward)) == ["2a", "2b", "2a", "1b", "0a"]
    assert [entry.request.attempt for entry in world.asked(Backward, stage=2)] == [1, 2, 3]
    assert world.trainer.commits.dropped == 0


@trained()
async def test_one_server_s_word_costs_an_attempt_and_blames_no_server(world):
    world.script("1a", Forward, INPUT)
    await world.merged()
    assert peers_of(world.asked(Forward)) == ["0a", "1a", "1b"]
    assert "shunned" not in dict(world.events)


@trained()
async def test_the_word_of_a_lone_server_has_a_message_made_again_and_no_server_is_skipped(world):
    world.order[1] = ["1a"]
    world.script("1a", Forward, INPUT)
    await world.merged()
    assert peers_of(world.asked(Forward)) == ["0a", "1a", "0a", "1a"]
    assert "shunned" not in dict(world.events)


@trained()
async def test_a_gradient_that_two_servers_cannot_read_ends_the_rest_of_a_microbatch(world):
    for peer in ("1a", "1b"):
        world.script(peer, Backward, GRADIENT)
    await world.until(lambda: world.trainer.commits.dropped)
    assert [event for event in world.events if event[0] == "dropped"] == [("dropped", 0)] * 2
    assert stages_of(world.asked(Backward)) == [2, 1, 1]
    await world.close(0, stages=(2,))
    await world.merged(1 + STAGES)
    assert set(peers_of(world.asked(Backward, stage=2)[1:])) == {"2b"}, (
        "the server that made it is passed by"
    )
    assert world.trainer.commits.finished == 0


@trained()
async def test_a_server_that_refused_is_asked_again_where_the_policy_names_no_other(world):
    """As while the others are banned."""
    next_hop = world.next_hop
    world.next_hop = lambda microbatch, stage, *rest: (
        next_hop(microbatch, stage, *rest) if stage != 1 else only(*rest)
    )

    def only(serving, now_s, size, exclude=()):
        return None if "1a" in exclude else "1a"

    world.script("1a", Forward, INPUT, saying(Refused("no")))
    await world.merged()
    assert peers_of(world.asked(Forward, stage=1)) == ["1a"] * 3


@trained()
async def test_a_server_that_was_skipped_is_asked_again_after_a_while(world):
    for peer in ("1a", "1b"):
        world.script(peer, Forward, INPUT)
    await world.merged()
    for number, pause_s in enumerate((0.0, QUARANTINE_S)):
        await asyncio.sleep(pause_s)
        world.order[0] = ["0a", "0b"]  # the policy takes the first
        await world.close(number)
        await world.merged((number + 2) * STAGES)
    assert peers_of(world.asked(Forward, stage=0)) == ["0a", "0b", "0b", "0a"]


@pytest.mark.parametrize("liar", ["0a", "1a"])
def test_with_a_server_that_makes_nonsense_for_ever_all_microbatches_come_through(liar):
    """Those after it refuse whatever it made."""

    def nonsense(request):
        return (
            (encode(Done(LIFE)), (b"nonsense",))
            if isinstance(request, Forward)
            else honest(request)
        )

    @trained(window=2, kept=2)
    async def main(world):
        ask = world.ask

        async def refusing(peer, raw, payloads, **rest):
            if b"nonsense" in payloads:
                world.scripts[peer, type(decode_request(raw))].insert(0, INPUT)
            return await ask(peer, raw, payloads, **rest)

        world.ask = refusing
        world.script(liar, Forward, *[nonsense] * 1000)
        await world.merged(2 * STAGES)
        await world.close(0, 1)
        await world.merged(4 * STAGES)
        assert (world.trainer.commits.finished, world.trainer.commits.dropped) == (2, 0)

    main()
