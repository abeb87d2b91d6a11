"""Rounds of a model that is cut into stages, over whole peers: a stage's members contribute and all
members vote. Whichever peers come, leave or die, each contribution counts once and each stage
continues."""

import asyncio
import json
from dataclasses import replace

import pytest
from worlds.flock import SHARDS, TOKENS, VIEW_S, flock, ids, name_of, stream
from worlds.waiting import until

from farflock.swarm.frame import unpack
from farflock.swarm.messages import Piece, Prepare
from farflock.swarm.peer.catch_up import HOPELESS_S
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.views import view_key
from farflock.swarm.roles import NOTHING
from farflock.swarm.sim.network import Faults

# Contributors, voters, and what onlookers hear.


@flock(0, 0, 1, NOTHING)
async def test_a_stage_s_members_contribute_and_everybody_knows_what_its_rounds_were_made_of(made):
    for stage in range(2):
        await made.go_on(stage, 4)
        names, participants, _ = made.results[stage][made.newest(stage)]
        assert participants == ids(*made.of(stage))
        assert len(names) == len(participants)
    await asyncio.sleep(1.0)
    for node in made.nodes.values():
        for stage in {0, 1} - {node.stage}:
            last = node.rounds.newest(name_of(stage))
            assert last >= made.newest(stage) - 1
            (told,) = node.rounds.last_shards(name_of(stage), last)
            assert tuple(json.loads(told)["names"]) == made.results[stage][last][0]
            assert json.loads(told)["shard"] == SHARDS - 1
            assert node.rounds.tokens(name_of(stage)) == made.results[stage][last][2]


@pytest.mark.parametrize(
    ("wants", "fetched"), [("last", {SHARDS - 1}), ("none", set()), ("all", set(range(SHARDS)))]
)
def test_an_onlooker_fetches_what_it_wants_and_no_more(wants, fetched):
    @flock(0, 0, NOTHING, wants=wants)
    async def main(made):
        await made.go_on(0, 3)
        node, name = made.nodes[2], name_of(0)
        entry = node.rounds.streams[name].log[number := node.rounds.newest(name) - 1]
        here = {item.index for item in entry.close.items if item.digest in node.peer.context.store}
        assert here == fetched
        assert entry.complete
        told = node.rounds.last_shards(name, number)
        assert told == (
            (b"",)
            if wants == "none"
            else (node.peer.context.store.get(entry.close.items[-1].digest),)
        )

    main()


@flock(0, 0, 1, NOTHING)
async def test_of_rounds_that_are_not_decided_or_have_left_the_log_nothing_is_told(made):
    await made.go_on(0, LOG_ROUNDS + 2, 30.0)
    rounds, name = made.nodes[3].rounds, name_of(0)
    oldest, newest = rounds.oldest(name), rounds.newest(name)
    assert newest - oldest == LOG_ROUNDS - 1
    assert rounds.last_shards(name, oldest - 1) is None
    assert rounds.last_shards(name, newest + 1) is None
    assert all(rounds.last_shards(name, number) is not None for number in range(oldest, newest))
    assert rounds.oldest(name_of(1)) <= rounds.newest(name_of(1))


@flock(0, 0, 1, NOTHING)
async def test_an_onlooker_away_for_longer_than_the_log_goes_on_with_what_there_is(made):
    looker, name = made.nodes[3], name_of(0)
    made.network.partition({looker.id}, set(ids(*made.of(0), *made.of(1))))
    await asyncio.sleep(1.0)
    before = looker.rounds.newest(name)
    await made.go_on(0, 2 * LOG_ROUNDS, 60.0)
    assert looker.rounds.newest(name) <= before + 1
    made.network.heal()
    await until(lambda: looker.rounds.newest(name) >= made.newest(0) - 1, 25.0, "its catching up")
    assert looker.rounds.oldest(name) > before + 1
    await until(
        lambda: looker.rounds.last_shards(name, looker.rounds.newest(name)) is not None,
        5.0,
        "the notes",
    )
    assert looker.rounds.tokens(name) == made.results[0][looker.rounds.newest(name)][2]
    assert looker.peer.context.counters["lost rounds"] == 0, "no state of its own was lost"


@flock(0, 0, 1)
async def test_a_round_is_called_once_another_member_has_brought_its_part_to_it(made):
    one, other = made.of(0)
    made.quiet.add(0)
    await asyncio.sleep(3.0)
    assert not one.rounds.called(name_of(0))
    bringing = asyncio.create_task(one.step())
    await asyncio.sleep(0.5)
    assert other.rounds.called(name_of(0))
    assert not one.rounds.called(name_of(0)), "its own part calls no other"
    joining = asyncio.create_task(other.step())
    await asyncio.sleep(0.01)
    assert not other.rounds.called(name_of(0)), (
        "a member that has brought its own waits for the end"
    )
    await asyncio.gather(bringing, joining)
    assert one.statuses[-1] == other.statuses[-1] == "ok"
    assert not other.rounds.called(name_of(0))


# Deaths, departures and newcomers.


async def starved_newcomer(made):
    """A second server of the first stage, which has its state but not the rounds since then, and
    the last round that it has."""
    newcomer = made.start(4, 0)
    await until(lambda: newcomer.applied >= 0, 20.0, "its state")
    made.network.tap = starved(newcomer)
    behind = newcomer.applied
    await until(
        lambda: made.newest(0) >= behind + 2 and newcomer.rounds.newest(name_of(0)) > behind,
        20.0,
        "rounds",
    )
    return newcomer, behind


def starved(node):
    """Return a tap that lets no pieces reach this node."""
    return lambda when_s, sender, to, packed: (
        None if to == node.id and isinstance(unpack(packed).message, Piece) else packed
    )


@flock(0, 1, NOTHING, NOTHING)
async def test_a_round_that_died_with_its_only_holder_has_failed_for_the_stages_next_server(
    made,
):
    """When the only server dies, a newcomer has the stage's state but not the rounds since then."""
    newcomer, behind = await starved_newcomer(made)
    made.kill(0)
    made.network.tap, made.may_give_up = None, True
    lost = made.newest(0)
    await made.go_on(0, 3, 90.0)
    assert newcomer.applied > lost
    assert made.given_up == {(0, number) for number in range(behind + 1, lost + 1)}
    assert newcomer.peer.context.counters["forsaken rounds"] == lost - behind


@flock(0, 0, 0, 1, NOTHING, NOTHING, NOTHING)
async def test_a_member_without_the_content_of_a_round_never_contributes_that_part_again(made):
    """Its contribution counts: it must not go on as if the round had failed."""
    left = made.nodes[2]
    made.network.tap = starved(left)
    await asyncio.sleep(2.0)
    stuck = left.applied + 1
    assert made.newest(0) >= stuck
    assert left.rounds.streams[name_of(0)].log[stuck].taken == (True,) * SHARDS
    for number in range(2):
        made.kill(number)
    made.network.tap = None
    await until(lambda: left.peer.context.counters["forsaken rounds"], 90.0, "that it gives up")
    assert left.applied == stuck - 1
    await until(lambda: left.statuses[-1] == "lost", 1.0, "its being told")
    assert not left.rounds.names or stuck not in left.rounds.streams[name_of(0)].log


@flock(0, 1, NOTHING, NOTHING)
async def test_a_content_that_comes_late_or_that_a_minority_waits_for_is_waited_for(made):
    newcomer, _ = await starved_newcomer(made)
    made.network.tap = None
    others = {node.id for node in made.nodes.values()} - {newcomer.id}
    made.network.partition({newcomer.id}, others)
    await asyncio.sleep(2 * HOPELESS_S)
    made.network.heal()
    await until(lambda: newcomer.applied >= made.newest(0) - 1, 60.0, "its catching up")
    assert newcomer.peer.context.counters["forsaken rounds"] == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_of_two_that_loses_one_goes_on_with_the_other(victim):
    @flock(0, 0, 1, 1, NOTHING)
    async def main(made):
        stage = made.nodes[victim].stage
        made.kill(victim)
        (left,) = made.of(stage)
        assert await made.go_on(stage, 2, 25.0) < 20.0
        assert await made.go_on(1 - stage, 2, 25.0) < 20.0
        await until(lambda: len(left.view.members) == 4, 30.0, "a view without the dead")
        await made.go_on(stage, 3)
        assert made.results[stage][made.newest(stage)][1] == (left.id,)
        assert left.statuses[-1] == "alone"
        assert "failed" not in left.statuses

    main()


@flock(0, 0, 1, 1, NOTHING)
async def test_a_server_that_comes_back_has_its_stages_state_and_contributes_again(made):
    made.kill(1)
    await asyncio.sleep(8.0)
    back = made.start(1, 0)
    await until(lambda: back.id in made.results[0][made.newest(0)][1], 30.0, "its contribution")
    assert made.results[0][made.newest(0)][1] == ids(*made.of(0))
    assert back.applied > 10
    assert "replayed" not in back.statuses[5:]
    assert back.tokens == made.results[0][back.applied][2]
    await made.go_on(0)


@flock(0, 0, 1, NOTHING)
async def test_a_stage_without_servers_stands_still_and_a_newcomer_s_rounds_go_on(made):
    """Its tokens stand still too: onlookers have heard them."""
    made.kill(2)
    before = made.newest(1)
    await made.go_on(0, 10, 40.0)
    assert made.newest(1) == before
    tokens = made.results[1][before][2]
    newcomer = made.start(4, 1)
    await until(lambda: made.newest(1) >= before + 3, 40.0, "rounds of the newcomer")
    results = [made.results[1][number] for number in sorted(made.results[1]) if number > before]
    assert results[0][2] == tokens + TOKENS
    assert {participants for _, participants, _ in results} == {(newcomer.id,)}
    assert len(newcomer.view.serving(1)) == 1
    await asyncio.sleep(1.0)
    assert made.nodes[3].rounds.newest(name_of(1)) >= made.newest(1) - 1, (
        "an onlooker hears of them too"
    )


@flock(0, 0, 0, 1, 1)
async def test_a_server_that_says_goodbye_is_out_of_its_stage_and_no_member_waits_for_it(made):
    goer, (left,) = made.nodes[3], [made.nodes[4]]
    goer.peer.leave()
    await until(lambda: goer.id not in left.view.peers, VIEW_S + 3.0, "the view without it")
    assert left.view.serving(1) == (left.view.peers.index(left.id),)
    made.kill(3)
    await made.go_on(1, 3, 8.0)
    assert made.results[1][made.newest(1)][1] == (left.id,)


@flock(0, 0, 0, 1, NOTHING)
async def test_a_server_that_changes_stage_contributes_only_to_the_new_one(
    made,
):
    made.kill(2)
    moved = made.start(2, 1)
    await until(
        lambda: made.newest(1) >= 0 and moved.id in made.results[1][made.newest(1)][1],
        30.0,
        "its new stage",
    )
    await made.go_on(1, 2)
    await made.go_on(0, 2)
    assert made.results[0][made.newest(0)][1] == ids(*made.of(0))
    assert made.results[1][made.newest(1)][1] == ids(*made.of(1))
    member = next(member for member in moved.view.members if member.peer == moved.id)
    assert (member.stage, member.incarnation) == (1, moved.life)


# Each stage counts its own rounds.


@flock(0, 0, 1, 1, NOTHING, pace_s={0: 0.3, 1: 2.5})
async def test_a_view_begins_on_each_stage_s_axis_where_that_stage_is(made):
    await made.go_on(0, 20, 60.0)
    assert made.newest(0) > made.newest(1) + 10
    for number, stage in ((5, 0), (6, 1)):
        at = [made.newest(0), made.newest(1)]
        newcomer = made.start(number, stage)
        await until(
            lambda new=newcomer, s=stage: new.id in made.results[s][made.newest(s)][1],
            40.0,
            "the newcomer's",
        )
        begins = newcomer.view.begins
        assert at[0] - 1 <= axes.at(begins, 0) <= made.newest(0) + 1
        assert at[1] - 1 <= axes.at(begins, 1) <= made.newest(1) + 1
        for other in range(2):
            await made.go_on(other, 2)
    assert made.newest(0) > made.newest(1) + 10


@flock(0, 0, 1, 1, NOTHING, pace_s={0: 0.3, 1: 2.5})
async def test_a_death_in_the_fast_stage_does_not_hold_up_the_slow_one_nor_the_other_way_round(
    made,
):
    await made.go_on(0, 10, 30.0)
    for victim, stage in ((0, 0), (2, 1)):
        made.kill(victim)
        assert await made.go_on(1 - stage, 2, 20.0) < 15.0
        assert await made.go_on(stage, 2, 30.0) < 20.0
        made.start(victim, stage)
        mates = made.of(stage)
        await until(
            lambda s=stage: len(made.results[s][made.newest(s)][1]) == 2, 40.0, "both of them"
        )
        assert len(mates) == 1 or {mate.stage for mate in mates} == {stage}


@flock(0, 0, 1, NOTHING)
async def test_a_member_that_wants_a_view_and_falls_silent_delays_the_stages_only_for_a_while(made):
    """A member that has told a peer where a view may begin votes in no round from there on;
    otherwise neither could ever be decided."""
    silent, before = made.nodes[3], made.nodes[0].view
    me = before.index(silent.id, silent.life)
    ask = Prepare(view_key(before.number + 1), before.hash, (1, me))
    for number in (0, 1, 2):
        made.nodes[number].peer.membership.receive(silent.id, silent.life, ask)
    for node in (made.nodes[number] for number in (0, 1, 2)):
        told = axes.at(node.peer.context.floor, 0)
        assert [node.peer.context.views.blocked(number, 0) for number in (told - 1, told)] == [
            False,
            True,
        ]
    assert await made.go_on(0, 3, 20.0) > 1.0
    await made.go_on(1, 3, 5.0)
    assert made.nodes[0].view.number > before.number
    assert made.nodes[0].view.members == before.members


@flock(0, 0, 1, NOTHING)
async def test_a_round_that_has_begun_gets_no_votes_either_once_a_view_may_begin_with_it(made):
    made.quiet.add(0)
    await asyncio.sleep(3.0)
    one, other = made.of(0)
    number, silent, before = one.applied + 1, made.nodes[3], one.view
    bringing = asyncio.create_task(one.step())
    await asyncio.sleep(0.3)
    ask = Prepare(
        view_key(before.number + 1), before.hash, (1, before.index(silent.id, silent.life))
    )
    for node in (one, other, made.nodes[2]):
        node.peer.membership.receive(silent.id, silent.life, ask)
    both = asyncio.gather(bringing, other.step())
    await asyncio.sleep(1.5)
    assert made.newest(0) == number - 1
    await asyncio.wait_for(both, 20.0)
    assert one.view.number > before.number
    assert made.results[0][number][1] == ids(one, other)


@flock(0, 0, 1, NOTHING)
async def test_views_say_what_each_member_does(made):
    for node in made.nodes.values():
        assert {(member.peer, member.stage) for member in node.view.members} == {
            (other.id, other.stage) for other in made.nodes.values()
        }


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_under_loss_doubling_and_deaths_every_law_holds(seed):
    @flock(0, 0, 1, 1, 2, 2, NOTHING, seed=seed, pace_s={2: 1.5})
    async def main(made):
        made.network.faults = Faults(loss=0.05, duplicate=0.05, reorder=0.1)
        for victim in (1, 2, 4):
            stage = made.nodes[victim].stage
            made.kill(victim)
            await asyncio.sleep(7.0)
            made.start(victim, stage)
            await asyncio.sleep(9.0)
        made.network.faults = Faults()
        for stage in range(3):
            await made.go_on(stage, 4, 60.0)
            await until(
                lambda s=stage: made.results[s][made.newest(s)][1] == ids(*made.of(s)),
                40.0,
                "all of a stage",
            )

    main()


@flock(0, 0, 1, NOTHING)
async def test_a_stream_that_was_closed_can_be_opened_for_another_part_in_it(made):
    looker, name = made.nodes[3], name_of(0)
    looker.rounds.close(name)
    assert name not in looker.rounds.names
    assert not any(machine.key.stream == name for machine in looker.rounds.machines.values())
    await made.go_on(0, 2)
    looker.peer.open(replace(stream(0), wants="none"), made.newest(0))
    await made.go_on(0, 2)
    await asyncio.sleep(1.0)
    assert looker.rounds.newest(name) >= made.newest(0) - 1
