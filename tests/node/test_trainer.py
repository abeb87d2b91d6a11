"""A trainer among scripted servers: whom it asks for what, and what it does about silence, lateness and loss."""

import asyncio
import collections

import pytest
import torch

from farflock.compression.activation_catalog import activation_codec
from farflock.compression.aqsgd import DIFFERENCE, HELD, KEPT
from farflock.node.sample_memory import NotHeld, ServerMemory
from farflock.node.stage_edges import Edges
from farflock.node.stage_requests import (
    Backward,
    Busy,
    Confirm,
    Done,
    Foreign,
    Forward,
    Gone,
    Lacks,
    Merged,
    Refused,
    Revoke,
    Stale,
    Unknown,
    Version,
    decode_request,
    encode,
)
from farflock.node.stage_rolls import Server
from farflock.node.trainer import ASKED_IN_VAIN, CONFIRM_TIMEOUT_S, PAUSE_S, Trainer, TrainerTerms, first_number
from farflock.swarm.calls import CallFailed
from farflock.swarm.messages import CodecId
from farflock.swarm.serving import Reply
from farflock.swarm.virtual import run_virtual
from farflock.swarm.wiring import Announced

STAGES, TOKENS, EPOCH, LIFE = 3, 4, 6, 1
CALL_S = 0.05


class Asked(collections.namedtuple("Asked", "peer request payloads")):
    """One request as it reached a server."""

    def __repr__(self):
        return f"{type(self.request).__name__.lower()} {self.peer}"


class Order(dict):
    """By stage, who serves it."""

    @property
    def stages(self):
        return {stage: [Announced(peer, LIFE) for peer in peers] for stage, peers in self.items()}


class World:
    """Two servers of each stage, `0a` and `0b` and so on, that do what they are asked unless a script says otherwise; and all
    that a trainer reads of the swarm."""

    me = "t"
    stages = STAGES

    def __init__(self, codec="raw", others=(), **terms):
        self.calls = self.codec_offers = self
        self.reads = {}  # by server, what it has said that it reads
        self.epoch, self.log, self.scripts = EPOCH, [], collections.defaultdict(list)
        self.order = Order({stage: [f"{stage}a", f"{stage}b"] for stage in range(STAGES)})
        self.closed, self.gone, self.doubtful, self.left_out = [], [], [], []
        self.results, self.events, self.under_way = [], [], collections.Counter()
        self.most = collections.Counter()
        others = tuple(map(activation_codec, others))
        self.edges = edges = Edges(activation_codec(codec), 1, TOKENS, 2, 16, 0, others=others)
        self.memories = collections.defaultdict(lambda: ServerMemory(edges))
        usual = {"window": 1, "kept": 1, "forward_timeout_s": 4.0, "backward_timeout_s": 6.0}
        walk = edges, self.batch, TrainerTerms(**{**usual, **terms}), self.report
        self.trainer = Trainer(self, self, self, *walk, samples=self.samples)

    def of(self, peer, life):
        assert life == LIFE
        return self.reads.get(peer)

    def batch(self, number):
        return torch.full((1, TOKENS), number % 16), torch.full((1, TOKENS), (number + 1) % 16)

    def samples(self, number):
        return (number % 2,)

    def report(self, kind, fields):
        self.events.append((kind, fields["number"]))

    # the rolls

    agreed_tokens = 0

    def tokens(self):
        return self.agreed_tokens

    def serving(self):
        return self.order

    def at(self, stage, peer):
        return Server(peer, LIFE)

    def server(self, name):
        peer = name.partition("/")[0]
        return Server(peer, LIFE) if peer in self.order[int(peer[0])] else None

    def named(self):
        closed, self.closed = self.closed, []
        yield from closed

    def left(self):
        gone, self.gone = self.gone, []
        yield from gone

    def skipped(self):
        return self.doubtful.pop() if self.doubtful else None

    # the policy: the first in line; who did not do it goes to its end

    def stage_order(self, microbatch):
        return tuple(range(STAGES))

    def next_hop(self, microbatch, stage, serving, now_s, size, exclude=()):
        return next((peer for peer in serving[stage] if peer not in exclude), None)

    def on_result(self, call, outcome, now_s):
        self.results.append((call.peer, outcome, call.size))
        line = self.order[call.stage]
        if outcome != "done" and call.peer in line:
            line.append(line.pop(line.index(call.peer)))

    # the servers

    async def ask(self, peer, raw, payloads, *, timeout_s, max_reply_bytes):
        request = decode_request(raw)
        self.log.append(Asked(peer, request, tuple(payloads)))
        place = (request.number, request.stage)
        self.under_way[place] += 1
        self.most["calls"] = max(self.most["calls"], self.under_way.total())
        try:
            await asyncio.sleep(CALL_S)
            script = self.scripts[peer, type(request)]
            done = script.pop(0) if script else honest
            if self.edges.remembers and done is honest and isinstance(request, Forward | Backward):
                reply = self.remembering(peer, request, payloads)
            else:
                reply = done(request)
            if reply is None:
                await asyncio.sleep(timeout_s)
                raise CallFailed("deadline", "silence")
            return Reply(*reply)
        finally:
            self.under_way[place] -= 1

    def remembering(self, peer, request, payloads):
        """As a server does with a codec that remembers samples: what comes out of a stage is its input and one more."""
        memory, x = self.memories[peer], torch.zeros(1, TOKENS, 2)
        try:
            x = memory.input(self.me, payloads[1], request) if request.stage else x
        except NotHeld as lacking:
            return (encode(Lacks(lacking.rows)),)
        if isinstance(request, Backward):
            return honest(request)
        return encode(Done(LIFE)), (memory.output(self.me, x + 1 + request.number / 16, request),)

    def script(self, peer, kind, *steps):
        """The next requests of this kind to this server are answered so, later ones as they should."""
        self.scripts[peer, kind] += steps

    # watching

    async def until(self, condition, within_s=60.0):
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.05)

    def asked(self, *kinds, stage=None):
        return [
            entry
            for entry in self.log
            if isinstance(entry.request, kinds) and (stage is None or entry.request.stage == stage)
        ]

    async def merged(self, count=STAGES):
        """Until so many confirmations were answered."""
        await self.until(lambda: len(self.asked(Confirm)) >= count)
        await asyncio.sleep(2 * CALL_S)

    async def close(self, *numbers, stages=range(STAGES)):
        """Rounds of these stages name these microbatches."""
        self.closed += [(stage, [(self.me, number) for number in numbers]) for stage in stages]
        await asyncio.sleep(0.3)


def honest(request):
    match request:
        case Forward():
            return encode(Done(LIFE)), (b"out of %d" % request.stage,)
        case Backward():
            loss = 8.0 if request.stage == STAGES - 1 else None
            gradient = (b"gradient of %d" % request.stage,) if request.stage else ()
            return encode(Done(LIFE, request.attempt, 0.1, loss)), gradient
        case Confirm():
            return (encode(Merged()),)
        case Revoke():
            return (encode(Unknown()),)


def saying(answer, *payloads):
    return lambda request: (encode(answer), payloads)


def silence(request):
    return None


def trained(**terms):
    """Run a test `main(world)` beside its trainer in virtual time."""

    def decorate(main):
        def test():
            async def whole():
                world = World(**terms)
                task = asyncio.create_task(world.trainer.run(lambda: False))
                try:
                    await main(world)
                finally:
                    world.trainer.stopping = True
                    await task
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


def stages_of(entries):
    return [entry.request.stage for entry in entries]


@trained()
async def test_a_microbatch_goes_forward_and_back_is_confirmed_and_is_over_when_all_stages_name_it(world):
    await world.merged()
    assert world.trainer.visits == {}
    assert stages_of(world.asked(Forward)) == [0, 1], "the last stage's own pass is part of its way back"
    assert stages_of(world.asked(Backward)) == [2, 1, 0]
    assert sorted(stages_of(world.asked(Confirm))) == [0, 1, 2]
    assert {entry.request.epoch for entry in world.asked(Forward, Backward)} == {EPOCH}
    assert [entry.request.source for entry in world.asked(Forward, Backward)] == [-1, 0, 1, 0, -1]
    assert world.trainer.recent_loss == 8.0 / TOKENS
    await world.close(0, stages=(0, 1))
    assert world.trainer.kept == 1
    await world.close(0, stages=(2,))
    assert ("microbatch", 0) in world.events
    assert world.trainer.begun == 2


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


def test_where_a_stage_finds_it_too_old_it_begins_anew_in_a_newer_round():
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
def test_whoever_brings_nothing_is_passed_by(kind, answer):
    @trained()
    async def main(world):
        world.script("1a", kind, answer)
        await world.merged()
        asked = world.asked(kind, stage=1)
        assert asked[0].payloads == asked[1].payloads
        assert len(asked) == 2
        assert len(world.asked(kind)) == (3 if kind is Forward else 4), "the other stages are asked once"
        if kind is Backward:
            assert [entry.request.attempt for entry in asked] == [1, 2]

    main()


@trained()
async def test_after_silence_somebody_else_is_asked_and_only_its_gradient_is_confirmed(world):
    world.script("1a", Backward, silence)
    await world.merged()
    assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b"]
    assert [(entry.peer, entry.request.attempt) for entry in world.asked(Confirm, stage=1)] == [("1b", 2)]
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
    assert {size for peer, _, size in world.results} == {1.0, 2.5}, "a confirmation says nothing of a server's speed"


@trained()
async def test_what_a_server_does_not_have_any_more_is_asked_for_again_and_the_rest_is_not(world):
    world.script("1a", Confirm, saying(Unknown()))
    await world.merged(STAGES + 1)
    asked = world.asked(Backward, stage=1)
    assert [entry.request.attempt for entry in asked] == [1, 3], "nothing that is still on its way counts"
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
async def test_who_is_gone_is_not_asked_to_confirm_but_waited_for_until_its_last_rounds_are_known(world):
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
async def test_where_nobody_serves_a_stage_it_waits_until_somebody_does(world):
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
    assert world.trainer.lost == 1
    assert len(world.asked(Backward, stage=1)) == 1


@trained(window=3, kept=7)
async def test_so_many_are_on_their_way_and_so_many_are_kept_and_no_more(world):
    most = 0
    for _ in range(200):
        await asyncio.sleep(0.03)
        walking = len(world.trainer._walking)
        most = max(most, walking)
        assert walking <= 3
        assert world.trainer.kept <= 7
    assert (most, world.trainer.kept, world.trainer.begun) == (3, 7, 7)
    assert world.most["calls"] <= 3 + 7 * STAGES
    await world.close(0, 1, 2)
    await asyncio.sleep(2.0)
    assert world.trainer.begun == 10


@trained(window=4, kept=16)
async def test_over_many_microbatches_nothing_grows(world):
    for _ in range(40):
        done = world.trainer.begun
        await asyncio.sleep(0.6)
        await world.close(*range(max(done - 16, 0), done))
    trainer = world.trainer
    assert trainer.begun > 80
    assert trainer.kept <= 16
    assert len(trainer._ledger._entries) <= 16 * STAGES
    assert len(trainer._tasks) <= 4 + 16 * STAGES
    assert len(trainer._asking) <= 16 * STAGES
    assert world.trainer.lost == 0


def test_a_fault_of_our_own_ends_the_trainer_loudly():
    async def main():
        world = World()

        def broken(number):
            raise ZeroDivisionError("a bug")

        world.trainer._batch = broken
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


def test_a_trainer_that_comes_later_begins_in_its_stream_where_the_run_is():
    """The numbers are those of its life, the batches go on from what was trained already."""
    world = World()
    drawn = []
    trainer = Trainer(
        world,
        world,
        world,
        Edges(activation_codec("raw"), 1, TOKENS, 2, 16, 0),
        lambda number: drawn.append(number) or world.batch(number),
        TrainerTerms(window=1, kept=1),
        first=first_number(3),
    )
    world.agreed_tokens = 7 * TOKENS

    async def main():
        running = asyncio.create_task(trainer.run(lambda: bool(drawn)))
        await running

    run_virtual(main())
    assert drawn == [7]
    assert trainer.begun == 1


# versions

NEW, OLD = Version(EPOCH + 2), Version(EPOCH, 7)


def versioned(request):
    """As servers answer that keep versions: stages have old weights forward, and new ones for who names none."""
    body, *payloads = honest(request)
    if not isinstance(request, Forward | Backward):
        return (body,)
    version = OLD if isinstance(request, Forward) else request.version or NEW
    loss = 8.0 if isinstance(request, Backward) and request.stage == STAGES - 1 else None
    return encode(Done(LIFE, getattr(request, "attempt", 0), 0.1, loss, version=version)), *payloads


def with_versions(*scripts, **terms):
    """Run a test with servers that keep versions, of which some answer otherwise at first."""

    def decorate(main):
        @trained(**terms)
        async def test(world):
            for peers in world.order.values():
                for peer in peers:
                    for kind in (Forward, Backward):
                        first = [step for who, what, step in scripts if (who, what) == (peer, kind)]
                        world.script(peer, kind, *first, *[versioned] * 20)
            await main(world)

        return test

    return decorate


@with_versions()
async def test_a_backward_pass_names_the_weights_of_its_forward_pass_also_when_it_is_asked_for_again(world):
    await world.merged()
    assert [entry.request.version for entry in world.asked(Backward)] == [None, OLD, OLD]
    world.gone += [(stage, f"{stage}a/{LIFE}") for stage in range(STAGES)]
    await world.until(lambda: len(world.asked(Backward)) == 6)
    again = {entry.request.stage: entry.request.version for entry in world.asked(Backward)[3:]}
    assert again == {2: NEW, 1: OLD, 0: OLD}, "the last stage's only pass has a version, too"


@with_versions(("1a", Backward, saying(Gone(EPOCH + 9, late=True))))
async def test_where_its_weights_may_be_used_no_more_the_rest_of_a_microbatch_is_dropped(world):
    await world.until(lambda: world.trainer.dropped)
    assert [event for event in world.events if event[0] == "dropped"] == [("dropped", 0)] * 2
    assert stages_of(world.asked(Backward)) == [2, 1]
    await world.close(0, stages=(2,))
    assert ("microbatch", 0) not in world.events, "it does not count everywhere"
    assert (world.trainer.finished, world.trainer.dropped) == (0, 2)
    await world.until(lambda: stages_of(world.asked(Backward)) == [2, 1, 2, 1, 0])


@with_versions(("1a", Backward, saying(Gone(EPOCH + 9, late=True))), gone="newest")
async def test_or_it_is_differentiated_at_the_newest_weights(world):
    await world.merged()
    assert [entry.request.version for entry in world.asked(Backward, stage=1)] == [OLD, None]
    assert world.trainer.dropped == 0


def test_who_has_not_got_the_weights_is_passed_by_until_nobody_seems_to_have_them():
    lacking = saying(Gone(EPOCH + 1, late=False))
    some = [("1a", Backward, lacking), ("1b", Backward, lacking), ("1a", Backward, lacking)]

    @with_versions(*some)
    async def found(world):
        await world.merged()
        assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b", "1a", "1b"]
        assert world.trainer.dropped == 0

    @with_versions(*some, ("1b", Backward, lacking))
    async def not_found(world):
        await world.until(lambda: world.trainer.dropped == 2)
        assert len(world.asked(Backward, stage=1)) == 4

    found(), not_found()


@trained()
async def test_what_is_written_in_a_version_that_is_over_is_dropped_at_the_stages_that_it_cannot_reach(world):
    """A codec's version, that is: no pass names weights."""
    world.script("1a", Backward, saying(Gone(EPOCH + 9, late=True)))
    await world.until(lambda: world.trainer.dropped)
    assert world.trainer.dropped == 2
    assert stages_of(world.asked(Backward)) == [2, 1]
    await world.close(0, stages=(2,))
    assert world.trainer.finished == 0


@with_versions(
    *[("1a", Backward, saying(Gone(EPOCH - 1, late=False)))] * 4,
    *[("1b", Backward, saying(Gone(EPOCH - 1, late=False)))] * 4,
)
async def test_who_has_yet_to_come_to_the_weights_is_asked_again(world):
    await world.merged()
    assert len(world.asked(Backward, stage=1)) == 9
    assert world.trainer.dropped == 0


@with_versions()
async def test_what_a_round_names_and_leaves_out_is_over_and_does_not_count(world):
    await world.merged()
    world.left_out += [(1, (world.me, 0)), (1, ("u", 0))]
    await world.close(0)
    assert world.trainer.dropped == 1
    assert world.trainer.finished == 0
    assert ("microbatch", 0) not in world.events
    assert not world.left_out


# Samples that are remembered.

AQSGD = {"codec": "aqsgd8,fp32", "kept": 9}


def kinds(world, kind, number):
    """In which kinds the inputs of this microbatch went, by stage, as often as they were sent."""
    asked = [entry for entry in world.asked(kind) if entry.request.number == number and entry.request.stage]
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
    assert third.held == world.asked(Forward, stage=1)[0].payloads[1][9:17], "the tag of what came then"
    assert all(entry.request.visit.held == b"" for entry in world.asked(Backward))
    visits = world.trainer.visits
    assert (visits["whole samples"], visits["not held"]) == (4, 0), "two samples, out of two stages"
    assert visits["differences"] >= 4


def test_a_server_that_lacks_what_is_meant_gets_it_whole_at_once_and_later_the_change_again():
    @trained(**AQSGD)
    async def main(world):
        world.order = Order({stage: [f"{stage}a"] for stage in range(STAGES)})
        await world.merged(2 * STAGES)
        world.memories.pop("1a")
        await world.merged(6 * STAGES)
        assert kinds(world, Forward, 2) == [(1, DIFFERENCE), (1, KEPT)]
        assert kinds(world, Backward, 2) == [(2, KEPT), (1, HELD)], "1a has forgotten what it sent, too"
        assert kinds(world, Forward, 4) == [(1, DIFFERENCE)]
        world.memories.pop("2a")
        await world.merged(8 * STAGES)
        assert kinds(world, Backward, 6) == [(2, DIFFERENCE), (2, KEPT), (1, HELD)]
        attempts = [entry.request.attempt for entry in world.asked(Backward, stage=2) if entry.request.number == 6]
        assert attempts == [1, 2], "another attempt"

    main()


def test_who_lacks_what_was_sent_whole_is_not_asked_again_at_once():
    @trained(**AQSGD)
    async def main(world):
        lacking = saying(Lacks((0,)))
        world.order[1] = ["1a"]
        world.script("1a", Forward, *[lacking] * 20)
        await asyncio.sleep(3.0)
        assert 5 <= len(world.asked(Forward, stage=1)) <= 3.0 / (PAUSE_S + CALL_S) + 1
        assert {entry.payloads[1][0] for entry in world.asked(Forward, stage=1)} == {KEPT}

    main()


@pytest.mark.parametrize("bad", [b"", bytes([HELD]) + bytes(16), bytes([DIFFERENCE]) + bytes(100), bytes(3000)])
def test_an_output_that_nobody_encodes_is_asked_for_again(bad):
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
        asked = [(entry.peer, entry.payloads[1]) for entry in world.asked(Forward, Backward, stage=1)]
        assert [(peer, payload[0]) for peer, payload in asked[:3]] == [("1a", KEPT), ("1a", HELD), ("1b", KEPT)]
        assert asked[0][1] == asked[2][1]

    main()


# codecs

RAW, INT8 = CodecId("raw,raw", 1), CodecId("int8,int8", 1)


def ways(entries):
    """What each request says of its codecs, by stage."""
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
async def test_who_cannot_read_it_is_not_asked(world):
    world.reads = {"1a": (INT8,), "1b": (RAW,), "2a": (INT8,), "2b": (RAW,)}
    await world.merged()
    assert {entry.peer for entry in world.asked(Forward, Backward)} == {"0a", "1b", "2b"}


@trained(others=("int8",))
async def test_what_a_stage_cannot_read_begins_anew_in_what_it_can(world):
    def foreign(request):
        world.reads |= {"1a": (INT8,), "1b": (INT8,)}
        return (encode(Foreign((INT8,))),)

    world.script("1a", Forward, foreign)
    await world.merged()
    said = [(entry.request.stage, entry.request.came, entry.request.sends) for entry in world.asked(Forward)]
    assert said == [(0, None, RAW), (1, RAW, RAW), (0, None, INT8), (1, INT8, INT8)]


def test_what_no_server_can_read_on_the_way_back_is_dropped_at_the_stages_that_it_cannot_reach():
    @trained()
    async def main(world):
        foreign = saying(Foreign((INT8,)))
        for peer in ("1a", "1b"):
            world.script(peer, Backward, *[foreign] * ASKED_IN_VAIN)
        await world.until(lambda: world.trainer.dropped)
        assert len(world.asked(Backward, stage=1)) == 2 * ASKED_IN_VAIN, "each of both was asked again"
        assert [event for event in world.events if event[0] == "dropped"] == [("dropped", 0)] * 2

    main()


@trained()
async def test_one_server_that_cannot_read_it_costs_an_attempt(world):
    world.script("1a", Backward, saying(Foreign((INT8,))))
    await world.merged()
    assert world.trainer.dropped == 0
    assert [entry.peer for entry in world.asked(Backward, stage=1)] == ["1a", "1b"]
