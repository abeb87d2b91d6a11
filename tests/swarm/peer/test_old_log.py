"""The notes of rounds are kept long after their content, so a peer that only watches misses no
round, however far behind it is."""

import asyncio
import json

import pytest
from worlds.flock import SHARDS, flock, name_of
from worlds.waiting import until

from farflock.swarm.messages import Forgotten, Key
from farflock.swarm.peer import round_log
from farflock.swarm.peer.catch_up import HOPELESS_S
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.roles import NOTHING


class Ears:
    """An observer's view of the rounds of stage 0 from now on: in order, as soon as they exist."""

    def __init__(self, looker):
        self.looker, self.name, self.heard, self.skipped = looker, name_of(0), {}, 0
        self.next = looker.rounds.newest(self.name) + 1

    def listen(self):
        rounds = self.looker.rounds
        if rounds.oldest_kept(self.name) > self.next:
            self.skipped += rounds.oldest_kept(self.name) - self.next
            self.next = rounds.oldest_kept(self.name)
        while (told := rounds.last_shards(self.name, self.next)) is not None:
            self.heard[self.next] = tuple(json.loads(told[0])["names"]) if told else ()
            self.next += 1

    async def all_of(self, made, number):
        await until(
            lambda: self.listen() or self.next > number, 60.0, f"round {number} at the looker-on"
        )
        assert {at: made.results[0][at][0] for at in self.heard} == self.heard


async def away(made, looker, rounds):
    """Cut the looker off from all the others for a number of rounds of stage 0."""
    made.network.partition({looker.id}, {node.id for node in made.nodes.values()} - {looker.id})
    await asyncio.sleep(1.0)
    await made.go_on(0, rounds, 10.0 * rounds)
    made.network.heal()


@flock(0, 0, 1, NOTHING, witnessed=True)
async def test_an_onlooker_away_for_longer_than_the_log_hears_of_every_round(made):
    ears = Ears(made.nodes[3])
    await away(made, made.nodes[3], 3 * LOG_ROUNDS)
    await ears.all_of(made, made.newest(0))
    assert (ears.skipped, len(ears.heard) >= 3 * LOG_ROUNDS) == (0, True)
    assert made.nodes[3].peer.context.counters["lost rounds"] == 0


@flock(0, 0, 1, NOTHING, witnessed=True)
async def test_only_what_a_round_was_about_stays_when_it_leaves_the_log(made):
    await made.go_on(0, 2 * LOG_ROUNDS, 60.0)
    await asyncio.sleep(1.0)
    for node in made.nodes.values():
        state, store = node.rounds.streams[name_of(0)], node.peer.context.store
        assert len(state.log) == LOG_ROUNDS
        assert list(state.old_log) + list(state.log) == list(
            range(node.rounds.newest(name_of(0)) + 1)
        )
        for number, entry in state.old_log.items():
            pinned = set(store.pinned(Key(name_of(0), number)))
            assert pinned == {item.digest for item in entry.close.items if item.index == SHARDS - 1}


@flock(0, 0, 1, NOTHING, witnessed=True)
async def test_of_a_stream_that_is_closed_nothing_is_kept(made):
    await made.go_on(0, 2 * LOG_ROUNDS, 60.0)
    node, name = made.nodes[3], name_of(0)
    state = node.rounds.streams[name]
    assert state.old_log
    node.rounds.close(name)
    assert (len(state.log), len(state.old_log), state.old_log_bytes) == (0, 0, 0)
    pins = [pin[1] if isinstance(pin, tuple) else pin for pin in node.peer.context.store.pins]
    assert not [pin for pin in pins if isinstance(pin, Key) and pin.stream == name]


@flock(0, 0, 1, NOTHING)
async def test_a_stream_that_is_not_witnessed_has_no_old_log(made):
    await made.go_on(0, LOG_ROUNDS + 3, 60.0)
    assert not any(node.rounds.streams[name_of(0)].old_log for node in made.nodes.values())
    assert made.nodes[3].rounds.oldest_kept(name_of(0)) == made.nodes[3].rounds.oldest(name_of(0))


@flock(0, 0, 0, 1, witnessed=True)
async def test_a_server_that_contributes_nothing_and_fell_behind_hears_that_its_round_is_lost(
    made,
):
    idle, name = made.nodes[2], name_of(0)
    await made.go_on(0, 2)
    idle.stage = NOTHING  # it still serves the stage, and waits for a batch
    await asyncio.sleep(10.0)
    assert not idle.rounds.called(name) or idle.rounds.newest(name) == made.newest(0)
    await away(made, idle, 2 * LOG_ROUNDS)
    await until(
        lambda: idle.peer.context.counters["lost rounds"] > 0, 30.0, "word that the round is gone"
    )
    assert idle.rounds.called(name)
    number = idle.rounds.newest(name) + 1
    outcome = await asyncio.wait_for(
        idle.peer.exchange(name, number, [b'{"name": "idle"}'] * SHARDS, tokens=0), 30.0
    )
    assert outcome.status == "lost"


@pytest.mark.parametrize(("limit", "most"), [("OLD_LOG_ROUNDS", 4), ("OLD_LOG_BYTES", 900)])
def test_the_old_log_is_bounded_and_what_has_left_it_is_said_to_be_skipped(
    monkeypatch, limit, most
):
    monkeypatch.setattr(round_log, limit, most)

    @flock(0, 0, 1, NOTHING, witnessed=True)
    async def main(made):
        ears = Ears(made.nodes[3])
        await away(made, made.nodes[3], 4 * LOG_ROUNDS)
        await ears.all_of(made, made.newest(0))
        assert 0 < ears.skipped < 4 * LOG_ROUNDS
        for node in made.nodes.values():
            state = node.rounds.streams[name_of(0)]
            assert 0 < len(state.old_log) <= 8
            assert node.peer.context.store.size_bytes < 100_000

    main()


@flock(0, 0, 1, NOTHING, witnessed=True)
async def test_one_that_has_forgotten_a_round_makes_no_peer_skip_it_while_another_has_it(made):
    looker, ears = made.nodes[3], Ears(made.nodes[3])
    made.network.partition({looker.id}, {node.id for node in made.nodes.values()} - {looker.id})
    await asyncio.sleep(1.0)
    await made.go_on(0, 2 * LOG_ROUNDS, 60.0)
    state, one = looker.rounds.streams[name_of(0)], made.nodes[0]
    told = Forgotten(Key(name_of(0), state.next), made.newest(0), made.newest(0))
    looker.rounds.receive(one.id, one.life, told)
    assert state.forgotten.said == {one.id: told}
    assert not looker.rounds.called(name_of(0)), "by the word of one"
    made.network.heal()
    await ears.all_of(made, made.newest(0))
    assert ears.skipped == 0


@flock(0, 0, 1, NOTHING)
async def test_a_new_onlooker_goes_on_with_the_newest_round_that_most_know(
    made,
):
    looker, name, liar = made.nodes[3], name_of(0), made.nodes[2]
    await made.go_on(0, LOG_ROUNDS + 4, 60.0)
    stream = looker.rounds.streams[name].stream
    looker.rounds.close(name)
    looker.rounds.open(stream)
    state = looker.rounds.streams[name]
    looker.rounds.receive(liar.id, liar.life, Forgotten(Key(name, state.next), 2**61, 2**61))
    assert state.newest == -1
    await until(lambda: looker.rounds.newest(name) >= 0, 10.0, "word of the others")
    assert LOG_ROUNDS <= looker.rounds.newest(name) <= made.newest(0)
    await until(lambda: looker.rounds.newest(name) > made.newest(0) - 2, 10.0, "its being there")


@flock(0, 0, 1, NOTHING)
async def test_a_new_onlooker_next_to_others_asks_the_peers_that_know(made):
    """Other onlookers cannot say that a round is gone if they never heard of it: the few peers that
    can are enough."""
    lookers, name = (made.nodes[2], made.nodes[3]), name_of(0)
    await made.go_on(0, LOG_ROUNDS + 4, 60.0)
    made.network.kill(made.nodes[1].id)
    for looker in lookers:
        stream = looker.rounds.streams[name].stream
        looker.rounds.close(name)
        looker.rounds.open(stream)
    await until(
        lambda: all(one.rounds.newest(name) >= LOG_ROUNDS for one in lookers),
        20.0,
        "word of the only one",
    )


@flock(0, 0, 1, NOTHING)
async def test_one_that_lives_and_answers_nothing_delays_no_other_for_ever(made):
    looker, name, mute = made.nodes[3], name_of(0), made.nodes[2]
    mute.rounds._catch_up.answer_query = lambda *question: None
    await away(made, looker, 2 * LOG_ROUNDS)
    await until(
        lambda: looker.rounds.newest(name) >= made.newest(0) - 1, HOPELESS_S + 10.0, "its going on"
    )


@flock(0, 0, 1, NOTHING)
async def test_the_word_of_one_misleads_no_peer_while_the_others_have_nothing_to_say(made):
    looker, name, liar = made.nodes[3], name_of(0), made.nodes[0]
    await made.go_on(0, 3)
    for node in made.nodes.values():
        node.stage = NOTHING  # no peer brings anything: the next round is decided late
    await asyncio.sleep(10.0)
    before = looker.rounds.newest(name)
    word = Forgotten(Key(name, before + 1), 2**40, 2**40)
    looker.rounds.receive(liar.id, liar.peer.context.incarnation, word)
    assert looker.rounds.streams[name].forgotten.by(before + 1, liar.id) == word
    await asyncio.sleep(HOPELESS_S + 5.0)
    assert looker.rounds.newest(name) == before
    assert looker.rounds.streams[name].next == before + 1


@pytest.mark.parametrize(
    ("witnessed", "number", "beyond"), [(False, 2, 0), (True, 3, 0), (True, 3, 2)]
)
def test_a_branch_begins_with_the_tokens_of_the_round_before_it_though_that_has_left_the_log(
    witnessed, number, beyond
):
    """A peer that knows decisions but not their content may have to give up all rounds of its log,
    noted ones included."""

    @flock(0, 0, 1, NOTHING, witnessed=witnessed)
    async def main(made):
        rounds, name = made.nodes[number].rounds, name_of(0)
        await made.go_on(0, LOG_ROUNDS + 6, 60.0)
        await asyncio.sleep(1.0)
        state = rounds.streams[name]
        first = next(iter(state.log)) - beyond
        for at in range(first, state.newest + 1):
            state.entry(at).complete = False
        rounds.close(name_of(1))
        rounds.rewind((0, first))
        assert (rounds.newest(name), rounds.tokens(name)) == (
            first - 1,
            made.results[0][first - 1][2],
        )
        assert state.old_log_bytes == sum(
            round_log._size_bytes(state, entry) for entry in state.old_log.values()
        )

    main()


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_a_stream_may_be_closed_while_what_it_votes_for_is_on_its_way(after_s):
    """A peer that takes over an abandoned stage does so, once it has watched for long enough to
    know where the stage is."""

    @flock(0, 0, 1, NOTHING, witnessed=True)
    async def main(made):
        looker, name = made.nodes[3], name_of(0)
        await made.go_on(0, 2)
        chunks, begun = looker.peer.context.chunks, asyncio.Event()
        spawn, fetch = looker.peer.context.spawn, chunks.fetch

        def spawned(work):
            if work.__name__ == "_fetch_for":
                begun.set()
            return spawn(work)

        async def slow(*given, **options):
            await asyncio.sleep(2.0)
            return await fetch(*given, **options)

        chunks.fetch, looker.peer.context.spawn = slow, spawned
        going = asyncio.create_task(made.go_on(0, 2))
        await begun.wait()
        await asyncio.sleep(after_s)
        looker.rounds.close(name)
        await going
        await asyncio.sleep(8.0)
        assert looker.peer.failure is None
        pins = looker.peer.context.store.pins
        assert not any(
            isinstance(pin, tuple) and pin[0] == "work" and pin[1].stream == name for pin in pins
        )

    main()
