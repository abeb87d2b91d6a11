"""Membership: joins, deaths, restarts and partitions become views that all members share."""

import asyncio
import collections
from itertools import pairwise

import pytest
from worlds.herd import VIEW_S, grown, identity, in_virtual_time
from worlds.peers import peer_in
from worlds.waiting import now, until

from farflock.swarm.frame import Frame, unpack
from farflock.swarm.messages import (
    Decided,
    Forgotten,
    Join,
    Key,
    Leave,
    Offer,
    PairRefuse,
    Ping,
    Pong,
    Propose,
    ViewQuery,
    Views,
)
from farflock.swarm.peer import membership
from farflock.swarm.peer.admission import FULL_ASKED, FULL_EVERY_S
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.protocol import views
from farflock.swarm.protocol.views import Member, View, view_key
from farflock.swarm.sim.network import LinkModel


def ids(herd, *numbers):
    return {herd.nodes[number].id for number in numbers}


def progress(herd, *numbers):
    return min(herd.nodes[number].applied for number in numbers)


@in_virtual_time()
async def test_a_founder_alone_is_a_run(herd):
    herd.start(0)
    await until(lambda: herd.nodes[0].applied >= 3, 10, "progress alone")
    assert herd.nodes[0].events[0][2] == "alone"


@in_virtual_time(4)
async def test_joiners_are_let_in_and_all_see_the_same_views(herd):
    chains = [
        [entry.view for entry in node.peer.context.views.views] for node in herd.nodes.values()
    ]
    newest = {chain[-1].hash for chain in chains}
    assert len(newest) == 1
    assert all(one.hash == other.previous for chain in chains for one, other in pairwise(chain))

    def together() -> bool:
        return {node.events[-1][2] if node.events else "" for node in herd.nodes.values()} <= {
            "ok",
            "partial",
            "replayed",
        }

    await until(together, 20, "a round of all four")


@in_virtual_time(4)
async def test_the_dead_leave_the_view_and_the_others_hardly_wait(herd):
    victim = herd.kill(2)
    died_s, before = now(), progress(herd, 0, 1, 3)
    await until(lambda: progress(herd, 0, 1, 3) > before + 1, 8, "progress without the dead")
    await until(
        lambda: all(victim.id not in herd.nodes[n].members for n in (0, 1, 3)),
        15,
        "a view without the dead",
    )
    assert now() - died_s < 5 + VIEW_S + 3
    assert not any(
        event[2] in ("failed", "lost") for n in (0, 1, 3) for event in herd.nodes[n].events
    )


@in_virtual_time(6)
async def test_over_lines_with_two_seconds_there_and_back_views_change_too(herd):
    for node in herd.nodes.values():
        herd.network.set_link(node.id, LinkModel(latency_s=0.5))
    await asyncio.sleep(5.0)
    herd.kill(4)
    for number in (5, 3, None):
        left = len(herd.nodes)
        await until(
            lambda left=left: all(len(node.members) == left for node in herd.nodes.values()),
            90.0,
            "a view",
        )
        if number is not None:
            herd.kill(number)


@in_virtual_time(3)
async def test_a_restarted_peer_comes_back_as_another_life_and_contributes(herd):
    old = herd.kill(1)
    await asyncio.sleep(0.5)
    new = herd.start(1)
    await until(
        lambda: new.peer.context.chain is not None and new.peer.membership.is_member,
        20,
        "its return",
    )
    await until(lambda: new.served(), 10, "its contribution")
    lives = {member.incarnation for member in herd.nodes[0].view.members if member.peer == new.id}
    assert lives == {new.incarnation}
    assert old.incarnation not in lives
    assert herd.nodes[0].view.peers[-1] == new.id, "at the end of the line"


@in_virtual_time(4)
async def test_a_member_that_leaves_is_out_of_the_next_view_without_waiting_for_its_death(herd):
    goer = herd.nodes[3]
    goer.peer.leave()
    await until(lambda: goer.id not in herd.nodes[0].members, VIEW_S + 3, "the view without it")
    assert herd.network.life(herd.nodes[0].id, goer.id) == "alive"
    await asyncio.sleep(10)
    assert goer.id not in herd.nodes[0].members, "it does not ask to be let in again"


@in_virtual_time(5)
async def test_the_majority_goes_on_and_the_minority_waits_and_replays_what_it_missed(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await asyncio.sleep(0.5)
    before = progress(herd, 3, 4)
    await until(lambda: progress(herd, 0, 1, 2) >= before + 3, 25, "the majority's progress")
    assert progress(herd, 3, 4) <= before + 1, "the minority decides nothing"
    assert herd.nodes[3].peer.waits(), "it can say what it waits for"
    missed = progress(herd, 0, 1, 2) - progress(herd, 3, 4)
    assert 1 < missed < LOG_ROUNDS
    herd.network.heal()
    await until(lambda: progress(herd, 3, 4) >= progress(herd, 0, 1, 2) - 1, 10, "catching up")
    assert not any(event[2] == "lost" for node in herd.nodes.values() for event in node.events)
    await until(
        lambda: all(len(node.members) == 5 for node in herd.nodes.values()), 20, "one run again"
    )
    known = herd.nodes[4].applied
    await until(
        lambda: any(number > known for number in herd.nodes[4].served()), 10, "its contribution"
    )


@in_virtual_time(5)
async def test_a_member_away_for_longer_than_the_log_is_lost_once_and_adopts(herd):
    herd.network.partition(ids(herd, 0, 1, 2, 3), ids(herd, 4))
    start = progress(herd, 0)
    await until(
        lambda: progress(herd, 0, 1, 2, 3) > start + LOG_ROUNDS + 3, 60, "progress without it"
    )
    herd.network.heal()
    away = herd.nodes[4]
    await until(
        lambda: any(event[2] == "adopted" for event in away.events[-3:]), 15, "its adoption"
    )
    assert [event[2] for event in away.events].count("lost") == 1
    known = away.applied
    await until(lambda: any(number > known for number in away.served()), 15, "its contribution")


@in_virtual_time(2)
async def test_of_two_the_senior_one_goes_on_and_the_junior_one_waits(herd):
    herd.network.partition(ids(herd, 0), ids(herd, 1))
    before = progress(herd, 1)
    await until(lambda: progress(herd, 0) > before + 3, 30, "the senior's progress")
    assert progress(herd, 1) <= before + 1
    herd.network.heal()
    await until(lambda: progress(herd, 1) >= progress(herd, 0) - 1, 20, "one run again")


@pytest.mark.parametrize("stopped_s", [0.6, 3.0, 12.0])
@pytest.mark.parametrize("number", [0, 2])
def test_a_peer_that_was_stopped_for_a_while_is_in_again_the_founder_too(stopped_s, number):
    @in_virtual_time(3)
    async def main(herd):
        node = herd.nodes[number]
        others = [other for other in range(3) if other != number]
        before = progress(herd, *others)
        herd.network.stop(node.id)
        await asyncio.sleep(stopped_s)
        if stopped_s > 10:
            assert node.id not in herd.nodes[others[0]].members
            assert progress(herd, *others) > before + 2, "the others went on"
        herd.network.cont(node.id)
        await until(
            lambda: all(len(other.members) == 3 for other in herd.nodes.values()), 20, "its return"
        )
        known = node.applied
        await until(lambda: any(done > known for done in node.served()), 20, "its contribution")

    main()


@pytest.mark.parametrize("number", [0, 2])
def test_a_machine_that_slept_is_counted_again_within_a_minute_and_starts_no_branch(number):
    """Its ticks stand still while it sleeps, so that its clock jumps between two of them."""

    @in_virtual_time()
    async def main(herd):
        herd.branch_after_s, herd.pace_s = 30.0, 2.0
        await grown(herd, 3)
        sleeper, other = herd.nodes[number], herd.nodes[1]
        awake, wait = asyncio.Event(), sleeper.peer.ticks.wait

        async def slept():
            await awake.wait()
            await wait()

        sleeper.peer.ticks.wait = slept
        herd.network.stop(sleeper.id)
        await asyncio.sleep(150.0)
        assert sleeper.id not in other.members
        assert other.applied > sleeper.applied + LOG_ROUNDS, "the others went on"
        awake.set()
        herd.network.cont(sleeper.id)
        known = other.applied
        await until(lambda: any(done > known for done in sleeper.served()), 60, "its contribution")
        assert sleeper.peer.membership.branch is None
        assert len(other.members) == 3

    main()


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_a_view_change_costs_no_round_and_loses_no_contribution(kind):
    @in_virtual_time(3, kind=kind)
    async def main(herd):
        herd.start(3)
        await until(
            lambda: len(herd.nodes) == 4 and len(herd.nodes[0].members) == 4, 20, "the fourth"
        )
        await until(lambda: herd.nodes[3].served(), 20, "its contribution")
        for number in range(3):
            statuses = {event[2] for event in herd.nodes[number].events}
            assert statuses <= {"ok", "alone", "partial", "replayed", "adopted"}, statuses

    main()


def deaf(herd, number, *kinds):
    """A tap through which one node hears no message of these kinds."""

    def tap(when_s, sender, to, packed):
        if to == herd.nodes[number].id and isinstance(unpack(packed).message, kinds):
            return None
        return packed

    herd.network.tap = tap


@in_virtual_time(4)
async def test_a_member_learns_a_missed_view_from_the_first_message_that_names_it(
    herd,
):
    deaf(herd, 1, Propose, Decided)
    herd.kill(3)
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the next view")
    await until(lambda: len(herd.nodes[1].members) == 3, 5, "news of it at the deaf one")


@in_virtual_time(4, group=2)
async def test_the_same_in_a_run_of_pairs_alone(herd):
    deaf(herd, 1, Propose, Decided)
    herd.nodes[2].quiet = True
    herd.kill(3)
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the next view")
    await until(lambda: len(herd.nodes[1].members) == 3, 10, "news of it at the deaf one")


@in_virtual_time(3)
async def test_an_idle_member_that_missed_a_view_asks_for_it(herd):
    """It contributes nothing to rounds, so no peer can tell it that it is behind: it must notice by
    itself."""
    herd.nodes[2].quiet = True
    await asyncio.sleep(2)
    deaf(herd, 2, Propose, Decided, Views)
    herd.start(3)
    await until(lambda: len(herd.nodes[0].members) == 4, 20, "the next view")
    assert len(herd.nodes[2].members) == 3
    herd.network.tap = None
    await until(lambda: len(herd.nodes[2].members) == 4, 10, "news of it at the idle one")


@in_virtual_time(3)
async def test_a_round_begun_under_the_wrong_view_is_begun_again_under_the_right_one(
    herd,
):
    """One member alone opens a round that the others then give to the next view; its offer must
    count there once."""
    lone = herd.nodes[2]
    for number in (0, 1):
        herd.nodes[number].quiet = True
    await asyncio.sleep(3)
    herd.network.partition(ids(herd, 0, 1), ids(herd, 2))
    await asyncio.sleep(1)
    opened = lone.applied + 1
    assert lone.peer.waits()
    for number in (0, 1):
        herd.nodes[number].quiet = False
    await until(lambda: progress(herd, 0, 1) >= opened + 1, 40, "the others' progress")
    herd.network.heal()
    await until(lambda: lone.applied >= progress(herd, 0, 1) - 1, 20, "its catching up")
    assert herd.counted


@in_virtual_time(3)
async def test_a_view_cannot_begin_at_a_round_that_was_touched_a_moment_ago(herd):
    """The floor must know of a round in the very moment in which it is begun, not a tick later."""
    node = herd.nodes[0]
    port = node.peer.context
    for other in herd.nodes.values():
        other.quiet = True
    await asyncio.sleep(3)
    number = node.applied + 1
    task = asyncio.create_task(node.step())
    await asyncio.sleep(0)
    newest = port.views.newest
    proposal = views.encode(View(newest.number + 1, newest.hash, number, newest.members))
    decision = node.peer.membership.next_view._ensure_decision()
    assert decision.rules.floor(proposal) == (number + 1,)
    for other in (1, 2):
        herd.nodes[other].quiet = False
    await task


@in_virtual_time(3)
async def test_a_proposer_keeps_the_members_that_promised_and_have_not_said_goodbye(herd):
    node = herd.nodes[0]
    newest = node.peer.context.views.newest
    rules = node.peer.membership.next_view._ensure_decision().rules
    alone = views.encode(View(newest.number + 1, newest.hash, 10**6, newest.members[:1]))

    def members(*promised):
        return views.decode_view(rules.revised(alone, (), promised)).members

    assert members(0) == newest.members[:1]
    assert members(0, 2) == (newest.members[0], newest.members[2])
    assert members(2, 1, 0) == newest.members
    node.peer.membership.admission.candidates.leaving.add(newest.peers[2])
    assert members(0, 1, 2) == newest.members[:2]


@in_virtual_time(2)
async def test_two_that_a_cut_parted_keep_each_other_although_one_took_the_other_for_dead(
    herd,
):
    """The senior does not notice the cut: frames to it pass again once the junior gives it up."""
    senior, junior = herd.nodes[0], herd.nodes[1]
    told = []

    def tap(when_s, sender, to, packed):
        message = unpack(packed).message
        if isinstance(message, Propose) and sender == junior.id:
            told.append(views.decode_view(message.value).peers)
        return packed

    herd.network.tap = tap
    life = herd.network.life
    given_up = [True]
    herd.network.life = lambda me, peer: (
        "dead" if given_up[0] and me == junior.id else life(me, peer)
    )
    await until(lambda: told, 30, "the junior's proposal")
    assert set(told[0]) == {junior.id, senior.id}, "it removed a member that had answered it"
    given_up[0] = False
    junior.quiet = True
    await junior.peer.leave_gracefully()
    herd.kill(1)
    del herd.nodes[1]
    await until(lambda: senior.members == {senior.id}, 30, "the view of the one that is left")
    known = senior.applied
    await until(lambda: senior.applied > known + 3, 20, "its progress")


# Strangers and old lives.


def stranger_frames(herd, sender):
    """Harmful messages from a peer that is not a member in this life."""
    node = herd.nodes[0]
    view = node.view
    key = Key("weights", node.applied + 1)
    return [
        Offer(key, view.hash, (bytes(32),) * 3, (5,) * 3, 1.0, 10),
        Decided(
            key, view.hash, b"\x94\x90\x90\x00\xc4\x00", (0, 0), ((0, b""), (1, b""), (2, b""))
        ),
        Forgotten(key, 10**6, 10**6),
        PairRefuse(key, 10**6),
        Leave(),
        Pong(0.0, 1e9),
        Propose(view_key(view.number + 1), view.hash, (1, 0), b"x"),
        Decided(view_key(view.number + 1), view.hash, b"x", (1, 0), ((0, b""), (1, b""))),
        Views(
            (
                b"nonsense",
                views.encode(
                    views.Certified(View(view.number + 1, view.hash, 10**6, view.members))
                ),
            )
        ),
        Views((b"\x91" * 1000,)),
        ViewQuery(10**6),
        Join(b"nonsense"),
        Join(herd.nodes[1].record),
    ]


@pytest.mark.parametrize("who", ["a stranger", "a member in an earlier life"])
def test_only_a_member_in_its_present_life_changes_anything(who):
    @in_virtual_time(3)
    async def main(herd):
        node = herd.nodes[0]
        sender, incarnation = (
            (identity(9).peer, 5) if who == "a stranger" else (herd.nodes[1].id, 5)
        )
        view, offset = node.view, node.peer.membership.clock.offset_s
        for message in stranger_frames(herd, sender):
            node.peer.router.deliver(sender, Frame(incarnation, message))
        await asyncio.sleep(VIEW_S + 3)
        assert node.view == view
        assert node.peer.membership.clock.offset_s == offset or who != "a stranger"
        assert node.peer.rounds.streams["weights"].seen < 10**5
        assert not any(event[2] in ("lost", "failed") for event in node.events)
        assert (
            sum(
                node.peer.context.counters[reason]
                for reason in node.peer.context.counters
                if "dropped" in reason
            )
            >= 6
        )
        assert len(node.peer.membership.admission.candidates.leaving) == 0

    main()


@in_virtual_time(2)
async def test_the_first_views_are_believed_only_of_the_peers_that_were_asked(herd):
    node = herd.start(2)
    liar = identity(9)
    fake = views.Certified(views.genesis("run", Member(liar.peer, 1)))
    node.peer.router.deliver(liar.peer, Frame(1, Views((views.encode(fake),))))
    assert node.peer.context.chain is None
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "its admission")
    assert liar.peer not in node.members


@in_virtual_time(2)
async def test_a_join_with_the_largest_incarnation_does_not_stop_the_views(herd):
    from farflock.swarm.record import Record, seal

    odd = identity(9)
    blob = seal(odd, Record("run", odd.peer, 2**63 - 1, 1, bytes(32)))
    herd.network.links(odd.peer)
    for node in herd.nodes.values():
        node.peer.router.deliver(odd.peer, Frame(2**63 - 1, Join(blob)))
    herd.start(2)
    await until(
        lambda: ids(herd, 0, 1, 2) <= herd.nodes[0].members, 25, "the honest joiner's admission"
    )


@in_virtual_time(3)
async def test_messages_about_an_old_view_are_answered_with_what_the_sender_lacks_but_not_each_one(
    herd,
):
    node, asker = herd.nodes[0], herd.nodes[1]
    old = node.peer.context.views.views[0].view
    sent = []
    send = node.peer.context.links.send
    node.peer.context.links.send = lambda peer, frame: (
        sent.append((peer, len(frame))) or send(peer, frame)
    )
    message = Offer(Key("weights", node.applied + 5), old.hash, (bytes(32),) * 3, (5,) * 3, 1.0, 10)
    for _ in range(100):
        node.peer.router.deliver(asker.id, Frame(asker.incarnation, message))
    answers = [size for peer, size in sent if peer == asker.id and size > 300]
    assert len(answers) == 1
    assert node.peer.context.counters["stale view"] >= 100


@in_virtual_time(3)
async def test_run_time_agrees_although_clocks_begin_anywhere(herd):
    await asyncio.sleep(12)
    times = [node.peer.run_s() for node in herd.nodes.values()]
    assert max(times) - min(times) < 0.05


@in_virtual_time(5)
async def test_of_many_members_some_in_turn_are_asked_for_the_time(herd):
    node, asked = herd.nodes[0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "MAX_PINGED", 3)
        send = node.peer.context.links.send

        def noting(peer, packed):
            if isinstance(unpack(packed).message, Ping):
                asked.append(peer)
            return send(peer, packed)

        node.peer.context.links.send = noting
        await asyncio.sleep(4 * membership.PING_EVERY_S)
    counts = collections.Counter(asked)
    assert counts.keys() == ids(herd, 1, 2, 3, 4)
    assert counts.total() == 4 * 3
    assert max(counts.values()) - min(counts.values()) <= 1


@in_virtual_time()
async def test_a_join_without_anybody_there_ends_in_time(herd):
    herd.start(0)
    await asyncio.sleep(1)
    herd.kill(0)
    node = herd.start(1)
    with pytest.raises(TimeoutError):
        await node.task
    assert now() == pytest.approx(31.0, abs=1)
    herd.nodes.pop(1)


@in_virtual_time(3)
async def test_a_full_run_is_asked_for_room_ever_more_rarely_and_lets_one_in_once_there_is(herd):
    with pytest.MonkeyPatch.context() as limit:
        limit.setattr(views, "MAX_MEMBERS", 3)
        node, asked = herd.start(3), collections.Counter()
        admission = node.peer.membership.admission
        await until(lambda: admission.is_full, 10, "the view that says so")

        def count(now_s, sender, receiver, frame):
            if sender == node.id and isinstance(unpack(frame).message, Join | ViewQuery):
                asked[type(unpack(frame).message).__name__] += 1
            return frame

        herd.network.tap = count
        await asyncio.sleep(60.0)
        assert 3 <= asked["ViewQuery"] <= 6 * FULL_ASKED  # after 1, 2, 4, 8, 16 and 30 s
        assert not asked["Join"], "no member is bothered with a request that nobody can grant"
        assert node.view.peers == herd.nodes[0].view.peers
        herd.nodes[2].peer.leave()
        await until(lambda: node.peer.membership.is_member, FULL_EVERY_S + 10, "its admission")
    assert node.id in herd.nodes[0].members


@in_virtual_time(3)
async def test_one_that_comes_back_to_a_full_run_has_its_place_in_it(herd):
    with pytest.MonkeyPatch.context() as limit:
        limit.setattr(views, "MAX_MEMBERS", 3)
        herd.kill(1)
        again = herd.start(1)
        await until(lambda: again.peer.context.chain is not None, 10, "the views")
        assert not again.peer.membership.admission.is_full
        await until(lambda: again.peer.membership.is_member, 10, "its return")


@in_virtual_time(2)
async def test_who_finds_a_run_full_hears_of_it_once_and_goes_on_when_there_is_room(herd):
    with pytest.MonkeyPatch.context() as limit:
        limit.setattr(views, "MAX_MEMBERS", 2)
        peer, told = peer_in(herd.network, identity(2), RunTerms("run", 7, VIEW_S), 9), []
        admission = peer.membership.admission
        admission.on_full = lambda: told.append(now())
        async with peer.running():
            await peer.meet(herd.records(but=None), 30.0)
            finding = asyncio.create_task(admission.find_room())
            await asyncio.sleep(20.0)
            assert (len(told), finding.done()) == (1, False)
            herd.nodes[1].peer.leave()
            await until(finding.done, FULL_EVERY_S + 10, "room")


@in_virtual_time(2)
async def test_who_finds_the_last_place_taken_once_it_asks_hears_of_it_too(herd):
    with pytest.MonkeyPatch.context() as limit:
        limit.setattr(views, "MAX_MEMBERS", 3)
        peer, told = peer_in(herd.network, identity(3), RunTerms("run", 7, VIEW_S), 9), []
        admission = peer.membership.admission
        admission.on_full = lambda: told.append(now())
        async with peer.running():
            await peer.meet(herd.records(but=None), 30.0)
            await admission.find_room()
            herd.start(2)  # while this one downloads the state
            await until(lambda: admission.is_full, 30.0, "the last place to be taken")
            assert told == []
            peer.ask_in()
            assert len(told) == 1
