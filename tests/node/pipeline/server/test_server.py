"""A stage server, asked directly: what it refuses, computes once, keeps, merges and contributes."""

import asyncio
import itertools

import pytest
import torch
from worlds.node_stage_server import (
    EPOCH,
    LIFE,
    MODEL,
    PASS_S,
    TOKENS,
    Bench,
    bytes_of,
    changed,
    served,
)

from farflock.compression import aqsgd
from farflock.compression.aqsgd import written
from farflock.node.pipeline.contrib.sample_memory import Row, TrainerMemory
from farflock.node.pipeline.passes.requests import (
    Busy,
    Confirm,
    Done,
    Foreign,
    Forward,
    Lacks,
    Merged,
    Refused,
    Revoke,
    Stale,
    Unknown,
    Visit,
    decode_answer,
    encode,
)
from farflock.node.pipeline.passes.stage import GradientAccumulator
from farflock.node.pipeline.server.server import BACKWARD_COST, EXPIRE_EVERY_S
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.messages import CodecId
from farflock.swarm.sim.virtual_time import run_virtual

# What is refused before anything is fetched.

REFUSED = {
    "another stage": (
        1,
        lambda b: (Forward(1, 2, 1, EPOCH), b.forward(1)[1]),
        "serves stage 1, not 2",
    ),
    "tokens for a later stage": (1, lambda b: b.forward(1, source=-1), "takes no output of -1"),
    "its own output": (1, lambda b: b.forward(1, source=1), "takes no output of 1"),
    "an activation for the first stage": (
        0,
        lambda b: b.forward(1, source=2),
        "takes no output of 2",
    ),
    "no payloads": (1, lambda b: (b.forward(1)[0], []), "payloads of"),
    "too few of them": (1, lambda b: (b.backward(1)[0], b.forward(1)[1]), "payloads of"),
    "too many of them": (1, lambda b: (b.forward(1)[0], b.backward(1)[1]), "payloads of"),
    "one that is too large": (
        1,
        lambda b: (b.forward(1)[0], [bytes(TOKENS), bytes(8 * TOKENS * 8 + 1)]),
        "at most",
    ),
    "more tokens than there are": (0, lambda b: (b.forward(1)[0], [bytes(TOKENS + 1)]), "at most"),
    "a gradient instead of targets": (
        2,
        lambda b: (b.backward(1)[0], [*b.forward(1)[1], bytes(512)]),
        "at most",
    ),
    "a confirmation with payloads": (1, lambda b: (Confirm(1, 1, 1), [b"x"]), "has no payloads"),
    "a revocation with payloads": (1, lambda b: (Revoke(1, 1, 1), [b"x"]), "has no payloads"),
}


@pytest.mark.parametrize(("index", "made", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused_and_says_why(index, made, why):
    bench = Bench(index)
    refusal = bench.admit(*made(bench))
    assert isinstance(refusal, Refused)
    assert why in refusal.why
    assert bench.server.served["refused"] == 1


@pytest.mark.parametrize("index", range(3))
def test_what_makes_sense_is_admitted(index):
    bench = Bench(index)
    for request in (
        bench.forward(1),
        bench.backward(1),
        (Confirm(1, index, 1),),
        (Revoke(1, index, 1),),
    ):
        assert bench.admit(*request) is None


@pytest.mark.parametrize("which", ["came", "sends"])
@pytest.mark.parametrize("named", [CodecId("vq:8,int8", 1), CodecId("raw,raw", 2), CodecId("", 0)])
def test_a_codec_that_is_not_read_here_is_foreign_and_those_that_are_are_named(which, named):
    bench = Bench(others=("int8",))
    for made in (bench.forward, bench.backward):
        assert bench.admit(*made(1, **{which: named})) == Foreign(
            (CodecId("raw,raw", 1), CodecId("int8,int8", 1))
        )
    assert bench.server.served["foreign"] == 2


@served(others=("int8",))
async def test_each_edge_has_the_codec_that_the_request_names(bench):
    raw, int8 = bench.edges.reads
    passed = await bench.ask(*bench.forward(1, came=raw, sends=raw))
    (plain,) = passed[1]
    (coded,) = (await bench.ask(*bench.forward(1, came=raw, sends=int8)))[1]
    assert len(plain) == bench.edges.max_bytes("forward", raw)
    assert len(coded) == bench.edges.max_bytes("forward", int8) < len(plain) / 4
    request, (tokens, _, outside) = bench.backward(2, came=int8, sends=raw)
    answer, (gradient,) = await bench.ask(request, (tokens, coded, outside))
    assert isinstance(answer, Done)
    assert len(gradient) == bench.edges.max_bytes("backward", int8), (
        "it goes back as its input came"
    )
    too_large = await bench.ask(bench.forward(3, came=int8)[0], bench.forward(3)[1])
    assert "at most" in too_large[0].why, "each payload is bounded by its own codec"


@pytest.mark.parametrize("raw", [b"", b"\xc1", encode(Merged()), b"\x91" * 4000])
def test_bytes_that_are_no_request_are_refused(raw):
    refusal = decode_answer(Bench().server.admit("t", raw, ()))
    assert "not a request to a stage" in refusal.why


@pytest.mark.parametrize(
    ("away", "stale"), [(-2, True), (-1, False), (0, False), (1, False), (2, False)]
)
def test_a_forward_pass_of_too_old_a_round_is_stale_and_hears_which_one_it_is(away, stale):
    bench = Bench(staleness=1)
    assert bench.admit(*bench.forward(1, epoch=EPOCH + away)) == (Stale(EPOCH) if stale else None)
    assert bench.admit(*bench.backward(1, epoch=EPOCH + away)) is None, (
        "it has begun, so it is to end"
    )


def test_where_the_queue_is_full_both_kinds_are_busy_each_for_itself():
    async def main():
        bench = Bench(queue=2, places=9)  # it does not run: nothing leaves the queue
        asked = [asyncio.create_task(bench.ask(*bench.forward(number))) for number in range(2)]
        await asyncio.sleep(0)
        assert bench.admit(*bench.forward(5)) == Busy()
        assert bench.admit(*bench.backward(5)) is None
        asked += [asyncio.create_task(bench.ask(*bench.backward(number))) for number in range(2)]
        await asyncio.sleep(0)
        assert bench.admit(*bench.backward(5)) == Busy()
        assert bench.admit(*bench.backward(1, attempt=2)) is None, (
            "what waits already takes no more room"
        )
        for task in asked:
            task.cancel()

    run_virtual(main())


def test_an_admitted_call_that_others_overtake_is_answered_busy_and_may_come_again():
    async def main():
        bench = Bench(queue=1, places=9)
        requests = [bench.backward(1), bench.backward(2), bench.forward(3), bench.forward(4)]
        assert [bench.admit(*request) for request in requests] == [None] * 4
        asked = [
            asyncio.create_task(bench.server.serve("t", encode(said), tuple(sent)))
            for said, sent in requests
        ]
        await asyncio.sleep(0.1)
        late = [decode_answer(asked[number].result().body) for number in (1, 3)]
        assert late == [Busy(), Busy()]
        async with bench.running():
            assert isinstance(decode_answer((await asked[0]).body), Done)
            assert isinstance(decode_answer((await asked[2]).body), Done)
            assert bench.server.pending.staging.taken == 1, "the one that found no room takes none"
            await bench.put_aside(2)

    run_virtual(main())


# Samples that are remembered.

SAMPLE = 3


def remembered(bench, values, there=bytes(8), back=False):
    """A request for a pass with this m, float16 (L, D); its server may hold `there`."""
    delta = Row(values, tag_of(values), bytes(8), b"", True).delta(there)
    request, payloads = bench.backward(1) if back else bench.forward(1)
    payloads[1] = written([delta])
    payloads[2:] = [bytes_of(bench.outside(1).float())] if back else []
    return changed(request, {"visit": Visit((SAMPLE,), b"" if back else bytes(8))}), payloads


def tag_of(values):
    return aqsgd._tag(values)


@served(codec="aqsgd4,fp32")
async def test_a_pass_is_that_of_the_activation_whose_tag_is_named_whatever_the_sample_is_by_now(
    bench,
):
    first, second = (bench.values(number, 1)[0].half() for number in (1, 2))
    answer, (output,) = await bench.ask(*remembered(bench, first))
    assert isinstance(answer, Done)
    trainer, request = TrainerMemory(bench.edges), remembered(bench, first)[0]
    (row,) = trainer.received(output, request, trainer.known(1, (SAMPLE,)))
    expected = bench.stage.forward(first.double()[None])[0]
    assert torch.equal(row.values, expected.half())
    answer, payloads = await bench.ask(*remembered(bench, first, tag_of(first), back=True))
    assert isinstance(answer, Done)
    back = bench.stage.backward(first.double()[None], bench.outside(1).float().double())
    staged = bench.server.pending.gradients["t", 1].staged
    assert all(torch.equal(x, back.staged.gradients[name]) for name, x in staged.gradients.items())
    assert await bench.say(Revoke(1, 1, 1)) == Unknown()
    await bench.ask(*remembered(bench, second))
    for back in (False, True):
        assert await bench.ask(*remembered(bench, first, tag_of(first), back)) == (Lacks((0,)), ())
    assert not bench.server.pending.gradients
    assert not bench.server.pending.replies
    answer, again = await bench.ask(*remembered(bench, first, back=True))
    assert isinstance(answer, Done)
    assert again == payloads, "the same gradient of the same activation"


@pytest.mark.parametrize(
    ("codec", "visit"),
    [("raw", Visit((1,), bytes(8))), ("aqsgd4", None), ("aqsgd4", Visit((1, 2)))],
)
def test_samples_are_named_where_they_are_remembered_alone(codec, visit):
    bench = Bench(codec=codec)
    refusal = bench.admit(*bench.forward(1, visit=visit))
    assert isinstance(refusal, Refused)
    assert "samples" in refusal.why


# Passes.


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("changes", [False, True])
def test_a_kept_graph_changes_no_bit_and_serves_only_the_weights_that_it_was_computed_with(
    index, changes
):
    @served(index, places=9)
    async def main(bench):
        twin = Bench(index, places=9)
        twin.server.passes.graphs.max_bytes = 0
        async with twin.running():
            for number in range(1, 4):
                passes = [await each.ask(*each.forward(number)) for each in (bench, twin)]
                assert passes[0][1] == passes[1][1]
            if changes:
                bench.apply_round()
                twin.apply_round()
            for number in range(1, 4):
                passes = [await each.put_aside(number) for each in (bench, twin)]
                assert passes[0][1] == passes[1][1]
                kept, again = (
                    each.server.pending.gradients["t", number].staged.gradients
                    for each in (bench, twin)
                )
                assert all(torch.equal(x, again[name]) for name, x in kept.items())
        # the first pass measured the size of a graph, and kept none
        assert bench.server.passes.graphs.used == (0 if changes else 2)
        assert not twin.server.passes.graphs.used

    main()


@pytest.mark.parametrize("index", range(3))
def test_passes_are_those_of_the_stage(index):
    @served(index)
    async def main(bench):
        answer, payloads = await bench.ask(*bench.forward(1))
        if index < 2:
            assert (answer.life, answer.took_s) == (LIFE, PASS_S)
            torch.testing.assert_close(
                _read(payloads[0]), bench.stage.forward(bench.inside(1)), rtol=0, atol=1e-12
            )
        answer, payloads = await bench.put_aside(1)
        wanted = bench.stage.backward(bench.inside(1), bench.outside(1))
        assert (answer.life, answer.attempt, answer.took_s) == (LIFE, 1, PASS_S * BACKWARD_COST)
        assert answer.loss_sum == wanted.loss_sum
        assert len(payloads) == (index > 0)
        if index:
            assert torch.equal(_read(payloads[0]), wanted.input_gradient)

    main()


def _read(payload):
    return torch.frombuffer(bytearray(payload), dtype=torch.float64).view(1, TOKENS, MODEL.dim)


@served(together=4)
async def test_forward_passes_that_wait_are_one_pass_and_each_has_the_result_that_it_has_alone(
    bench,
):
    answers = await asyncio.gather(*(bench.ask(*bench.forward(number)) for number in range(6)))
    assert bench.passes == [4, 2]
    for number, (answer, payloads) in enumerate(answers):
        assert isinstance(answer, Done)
        torch.testing.assert_close(
            _read(payloads[0]), bench.stage.forward(bench.inside(number)), rtol=0, atol=1e-12
        )


@served(together=4)
async def test_what_cannot_be_read_is_refused_and_those_beside_it_are_not(bench):
    requests = [bench.forward(number) for number in range(4)]
    requests[1][1][0] = bytes([200]) * TOKENS  # ids beyond the vocabulary
    requests[2][1][1] = bytes_of(bench.values(2, 1) * float("nan"))
    answers = await asyncio.gather(*(bench.ask(*request) for request in requests))
    assert [type(answer) for answer, _ in answers] == [Done, Refused, Refused, Done]
    assert [answers[number][0].unread for number in (1, 2)] == [None, "input"]
    for number in (0, 3):
        torch.testing.assert_close(
            _read(answers[number][1][0]),
            bench.stage.forward(bench.inside(number)),
            rtol=0,
            atol=1e-12,
        )


@served()
async def test_a_backward_pass_comes_before_forward_passes_that_wait(bench):
    ends = []

    async def ask(name, request):
        answer, _ = await bench.ask(*request)
        ends.append((name, answer.waited_s))

    await asyncio.gather(
        *(ask(f"f{number}", bench.forward(number)) for number in range(2)),
        ask("b", bench.backward(7)),
    )
    back_s = PASS_S * BACKWARD_COST
    assert ends == [("b", 0.0), ("f0", back_s), ("f1", back_s)]


CORRUPT = {
    "short tokens": (0, b"short", None),
    "ids beyond the vocabulary": (0, bytes([200]) * TOKENS, None),
    "a short activation": (1, bytes(8), "input"),
    "an activation that is no number": (1, b"\xff" * 512, "input"),
    "a short gradient": (2, bytes(8), "gradient"),
    "a gradient that is no number": (2, b"\xff" * 512, "gradient"),
    "a gradient whose own is infinite": (
        2,
        bytes_of(torch.full((TOKENS, 8), 1.7e308, dtype=torch.float64)),
        "gradient",
    ),
}


@pytest.mark.parametrize(("place", "payload", "unread"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_backward_pass_of_corrupt_payloads_is_refused_and_leaves_nothing_behind(
    place, payload, unread
):
    @served(places=1)
    async def main(bench):
        request, payloads = bench.backward(1)
        spoilt = [*payloads[:place], payload, *payloads[place + 1 :]]
        answer, _ = await bench.ask(request, spoilt)
        assert isinstance(answer, Refused)
        assert answer.unread == unread
        assert not bench.server.pending.gradients
        assert not bench.server.pending.replies
        assert await bench.say(Confirm(1, 1, 1)) == Unknown()
        await bench.merge(1, attempt=2)
        assert bench.server.accounts.take().staged.tokens == TOKENS

    main()


@served(0)
async def test_a_gradient_that_is_not_finite_never_gets_into_the_sum(bench):
    request, payloads = bench.backward(1)
    huge = bytes_of(torch.full((TOKENS, 8), 1.7e308, dtype=torch.float64))
    answer, _ = await bench.ask(request, [payloads[0], huge])
    assert answer == Refused("its gradient is not finite", "gradient")
    await bench.merge(2)
    assert all(
        bool(x.isfinite().all()) for x in bench.server.accounts.take().staged.gradients.values()
    )


# Once, however often it is asked for.


@served()
async def test_a_backward_pass_is_computed_once_however_often_it_is_asked_for(bench):
    asked = [asyncio.create_task(bench.ask(*bench.backward(1, attempt))) for attempt in (1, 2, 3)]
    answers = [await task for task in asked]
    later = await bench.ask(*bench.backward(1, 4))
    assert bench.passes == [BACKWARD_COST]
    assert len({payloads for _, payloads in (*answers, later)}) == 1
    assert [answer.attempt for answer, _ in (*answers[1:], later)] == [2, 3, 4]
    assert await bench.say(Confirm(1, 1, 4)) == Merged()
    again, _ = await bench.ask(*bench.backward(1, 5))
    assert isinstance(again, Refused)
    assert bench.server.accounts.take().staged.tokens == TOKENS


@served()
async def test_it_merges_nothing_for_a_trainer_that_does_not_know_of_its_membership(bench):
    bench.server.is_known_in = lambda view: view >= 6
    await bench.ask(*bench.backward(1, 1))
    assert await bench.say(Confirm(1, 1, 1, 5)) == Busy()
    assert bench.server.accounts.tokens == 0
    assert await bench.say(Confirm(1, 1, 1, 6)) == Merged()
    assert await bench.say(Confirm(1, 1, 1, 5)) == Busy()
    assert bench.server.accounts.tokens == TOKENS


@served()
async def test_the_first_to_ask_is_answered_although_it_was_cancelled_and_asked_again(bench):
    first = asyncio.create_task(bench.ask(*bench.backward(1, 1)))
    second = asyncio.create_task(bench.ask(*bench.backward(1, 2)))
    await asyncio.sleep(PASS_S)
    second.cancel()
    answer, _ = await first
    assert isinstance(answer, Done)
    third, _ = await bench.ask(*bench.backward(1, 3))
    assert third.attempt == 3
    assert bench.passes == [BACKWARD_COST]


@served()
async def test_the_same_number_of_two_trainers_are_two_microbatches(bench):
    await bench.merge(1, caller="t")
    await bench.merge(1, caller="u")
    assert notes.read(_offered(bench)) == [("t", 1), ("u", 1)]


def _offered(bench, number=6):
    bench.server.accounts.take()
    return bench.server.accounts.brought(number)


@served()
async def test_a_confirmation_merges_once_however_often_it_comes(bench):
    await bench.put_aside(1)
    assert [await bench.say(Confirm(1, 1, 1)) for _ in range(3)] == [Merged()] * 3
    assert bench.server.accounts.tokens == TOKENS
    assert bench.server.accounts.take().staged.tokens == TOKENS


@served()
async def test_a_refused_confirmation_is_final_for_all_attempts_up_to_it(bench):
    await bench.put_aside(1, attempt=3)
    assert await bench.say(Confirm(1, 1, 4)) == Unknown()
    assert not bench.server.pending.gradients, "nothing can merge it any more"
    assert await bench.say(Confirm(1, 1, 3)) == Unknown()
    late, _ = await bench.ask(*bench.backward(1, 4))
    assert isinstance(late, Refused)
    await bench.merge(1, attempt=5)
    assert bench.server.accounts.take().staged.tokens == TOKENS


@served(places=1)
async def test_what_is_revoked_is_dropped_and_its_place_is_free(bench):
    await bench.put_aside(1, attempt=2)
    assert await bench.say(Revoke(1, 1, 1)) == Unknown()
    assert len(bench.server.pending.gradients) == 1, "an earlier attempt is not this one"
    assert (await bench.ask(*bench.backward(2)))[0] == Busy()
    assert await bench.say(Revoke(1, 1, 2)) == Unknown()
    assert not bench.server.pending.gradients
    assert not bench.server.pending.replies
    await bench.put_aside(2)


@served(places=1)
async def test_what_is_revoked_while_it_is_computed_is_dropped_when_it_is_done(bench):
    asked = asyncio.create_task(bench.ask(*bench.backward(1)))
    await asyncio.sleep(PASS_S)
    await bench.say(Revoke(1, 1, 1))
    answer, _ = await asked
    assert isinstance(answer, Refused)
    assert not bench.server.pending.gradients
    assert not bench.server.pending.replies
    await bench.put_aside(2)


@served(places=1, lease_s=5.0)
async def test_what_is_not_confirmed_in_time_is_dropped_and_its_place_is_free(bench):
    await bench.put_aside(1)
    await asyncio.sleep(4.0)
    assert (await bench.ask(*bench.backward(2)))[0] == Busy()
    await asyncio.sleep(2.5)
    assert not bench.server.pending.gradients
    assert not bench.server.pending.replies
    assert await bench.say(Confirm(1, 1, 1)) == Unknown()
    await bench.put_aside(2)


@served(places=2)
async def test_gradients_that_are_put_aside_are_as_many_as_there_are_places(bench):
    for number in (1, 2):
        await bench.put_aside(number)
    assert (await bench.ask(*bench.backward(3)))[0] == Busy()
    assert (await bench.ask(*bench.backward(2, attempt=2)))[0].attempt == 2, (
        "this one has its place"
    )
    await bench.say(Confirm(1, 1, 1))
    await bench.put_aside(3)


@served(places=1)
async def test_a_pass_waits_for_a_place_and_has_it_as_soon_as_it_is_free(bench):
    await bench.put_aside(1)
    second = asyncio.create_task(bench.ask(*bench.backward(2)))
    third = asyncio.create_task(bench.ask(*bench.backward(3)))
    await asyncio.sleep(0.5 * EXPIRE_EVERY_S)
    assert not second.done()
    assert await bench.say(Confirm(1, 1, 1)) == Merged()
    assert isinstance((await second)[0], Done)
    assert not third.done(), "the line keeps its order"
    assert await bench.say(Revoke(2, 1, 1)) == Unknown()
    assert isinstance((await third)[0], Done)
    assert len(bench.server.pending.gradients) == 1


@served(places=1, queue=2)
async def test_a_line_for_places_is_as_long_as_the_queue_and_ends_if_no_place_comes_free(bench):
    await bench.put_aside(1)
    waiting = [asyncio.create_task(bench.ask(*bench.backward(number))) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert [task.result()[0] for task in done] == [Busy()], "only two may wait"
    answers = await asyncio.gather(*waiting)
    assert [answer for answer, _ in answers] == [Busy()] * 3, "nobody confirms the first"
    assert await bench.say(Confirm(1, 1, 1)) == Merged()
    await bench.put_aside(2)


# What counts.


@pytest.mark.parametrize("index", range(3))
def test_a_step_is_made_of_what_was_merged_and_of_nothing_else(index):
    @served(index)
    async def main(bench):
        for number in (1, 2):
            await bench.merge(number)
        await bench.put_aside(3)
        taken, wanted, losses = bench.server.accounts.take(), GradientAccumulator(), 0.0
        for number in (1, 2):
            back = bench.stage.backward(bench.inside(number), bench.outside(number))
            wanted.add(back.staged)
            losses += float(back.loss_sum or 0.0)
        assert taken.staged.tokens == 2 * TOKENS
        for name, x in wanted.sums.items():
            torch.testing.assert_close(taken.staged.gradients[name], x, rtol=0, atol=1e-12)
        if index == 2:
            assert taken.loss == pytest.approx(losses / (2 * TOKENS), rel=1e-12)
        else:
            assert taken.loss is None
        again = bench.server.accounts.take()
        assert (again.staged.tokens, again.staged.gradients, again.loss) == (0, {}, None)

    main()


@served()
async def test_a_contribution_names_what_was_taken_for_steps_and_a_round_s_notes_end_its_account(
    bench,
):
    server = bench.server
    for number in (1, 2):
        await bench.merge(number)
    server.accounts.take()
    await bench.merge(3)
    noted = server.accounts.brought(6)
    assert notes.read(noted) == [("t", 1), ("t", 2)], "what no step has taken is in no contribution"
    assert server.accounts.tokens == 3 * TOKENS
    server.accounts.closed(6, notes.written([("t", 1), ("t", 2), ("u", 9)]))
    assert server.accounts.tokens == 3 * TOKENS, (
        "closed by the caller that applies it; taken in between steps"
    )
    server.accounts.absorb()
    assert server.accounts.tokens == TOKENS
    server.accounts.take()
    assert notes.read(server.accounts.brought(7)) == [("t", 3)]


@served(2)
async def test_a_nodes_own_training_counts_next_to_what_others_ask_for_and_takes_no_place(
    bench,
):
    server, wanted = bench.server, GradientAccumulator()
    for number in range(1, 8):  # more than there are places
        back = bench.stage.backward(bench.inside(number), bench.outside(number))
        server.accounts.merged.clear()
        await server.contribute(("me", number), back.staged, float(back.loss_sum), 0)
        assert server.accounts.merged.is_set()
        wanted.add(back.staged)
    await bench.merge(20)
    wanted.add(bench.stage.backward(bench.inside(20), bench.outside(20)).staged)
    assert (server.accounts.untaken("me"), server.accounts.untaken("t")) == (7, 1)
    assert (server.accounts.tokens, server.served["merged"]) == (8 * TOKENS, 8)
    taken = server.accounts.take()
    assert server.accounts.untaken("me") == 0
    assert taken.staged.tokens == 8 * TOKENS
    assert taken.loss is not None
    for name, x in wanted.sums.items():
        torch.testing.assert_close(taken.staged.gradients[name], x, rtol=0, atol=1e-12)
    mine = [("me", number) for number in range(1, 8)]
    assert notes.read(server.accounts.brought(6)) == [*mine, ("t", 20)]
    server.accounts.closed(6, notes.written(mine[:3]))
    server.accounts.absorb()
    assert notes.read(server.accounts.brought(7)) == [*mine[3:], ("t", 20)]


@served()
async def test_what_a_round_does_not_name_is_in_the_next_contribution(bench):
    server = bench.server
    await bench.merge(1)
    assert notes.read(_offered(bench, 6)) == [("t", 1)]
    for number, noted in ((6, b""), (7, notes.written([("u", 1)])), (8, b"no list")):
        server.accounts.closed(number, noted)
        server.accounts.absorb()
        assert server.accounts.tokens == TOKENS
        assert notes.read(server.accounts.brought(number + 1)) == [("t", 1)]
    server.accounts.closed(9, notes.written([("t", 1)]))
    server.accounts.absorb()
    assert server.accounts.tokens == 0
    assert notes.read(server.accounts.brought(10)) == []
    assert await bench.say(Confirm(1, 1, 1)) == Merged()
    assert bench.server.accounts.take().staged.tokens == 0, "it counts already"


@served()
async def test_two_steps_of_one_round_are_named_together(bench):
    for number in (1, 2):
        await bench.merge(number)
        bench.server.accounts.take()
    assert notes.read(bench.server.accounts.brought(6)) == [("t", 1), ("t", 2)]


@served()
async def test_a_caller_that_waits_for_a_merge_is_woken(bench):
    waiting = asyncio.create_task(bench.server.accounts.merged.wait())
    await bench.put_aside(1)
    assert not waiting.done()
    await bench.say(Confirm(1, 1, 1))
    await asyncio.wait_for(waiting, 0.1)


@served(places=3, queue=4, lease_s=3.0)
async def test_over_hundreds_of_microbatches_nothing_grows(bench):
    for number, attempt in itertools.product(range(100), (1, 2)):
        await bench.ask(*bench.backward(number, attempt))
        if number % 3 == 0:
            await bench.say(Confirm(number, 1, attempt))
        if number % 10 == 9:
            noted = _offered(bench, number)
            bench.server.accounts.closed(number, noted)
            bench.server.accounts.absorb()
    await asyncio.sleep(5.0)
    server = bench.server
    pending, accounts = server.pending, server.accounts
    kept = [pending.gradients, pending.replies, pending.staging]
    kept += [accounts.taken, accounts.sums.rounds, accounts.rounds_over]
    assert [len(entries) for entries in kept] == [0] * 6
    assert server.accounts.tokens == 0
    assert server.served["merged"] == 34
