"""Passes on held-out text at one stage server: what they answer, and that nothing of them stays."""

import asyncio

import pytest
import torch
from worlds.node_stage_server import EPOCH, LIFE, TOKENS, Bench, bytes_of, changed, served

from farflock.compression.aqsgd import AqSgd
from farflock.node.pipeline.passes.requests import (
    Busy,
    Done,
    Foreign,
    HeldOutForward,
    NotFinite,
    Refused,
)
from farflock.swarm.messages import CodecId


def measure(bench, number, **changes):
    request = HeldOutForward(number, bench.index, bench.index - 1, EPOCH)
    payloads = bench.forward(number)[1]
    if bench.stage.is_last:
        payloads.append(bench.edges.pack(bench.outside(number)))
    return changed(request, changes), payloads


def kept(bench):
    """All that a server holds of microbatches."""
    server = bench.server
    return (
        len(server.passes.graphs),
        len(server.pending.replies),
        server.pending.staging.free,
        len(server.accounts.sums.rounds),
        server.served["merged"],
    )


@pytest.mark.parametrize("index", [0, 1])
def test_the_output_is_that_of_a_forward_pass_and_no_graph_is_kept(index):
    @served(index)
    async def main(bench):
        await bench.ask(*bench.forward(1))  # the first pass of a server only measures its graph
        before = kept(bench)
        answer, payloads = await bench.ask(*measure(bench, 2))
        assert answer == Done(LIFE, took_s=answer.took_s, waited_s=answer.waited_s)
        assert payloads == (bytes_of(bench.stage.forward(bench.inside(2))),)
        assert kept(bench) == before
        await bench.ask(*bench.forward(2))
        assert kept(bench)[0] == before[0] + 1
        assert (bench.server.served["measure"], bench.server.served["forward"]) == (1, 2)

    main()


@served(2)
async def test_the_last_stage_answers_with_the_loss_of_each_sequence(bench):
    before = kept(bench)
    answer, (payload,) = await bench.ask(*measure(bench, 3))
    assert isinstance(answer, Done)
    assert answer.loss_sum is None
    found = bench.edges.unpack_losses(payload)
    wanted = bench.stage.loss_sum(bench.inside(3), bench.outside(3)) / TOKENS
    assert found.tolist() == pytest.approx([wanted], rel=1e-12)
    assert kept(bench) == before


@served(1, together=4)
async def test_passes_of_training_beside_it_have_the_results_that_they_have_alone(bench):
    asked = [bench.forward(1), measure(bench, 2), bench.forward(3), measure(bench, 4)]
    replies = await asyncio.gather(*(bench.ask(*each) for each in asked))
    for number, (answer, payloads) in zip((1, 2, 3, 4), replies, strict=True):
        assert isinstance(answer, Done)
        assert payloads == (bytes_of(bench.stage.forward(bench.inside(number))),)
    assert len(bench.server.passes.graphs) <= 2


@pytest.mark.parametrize("index", [0, 2])
def test_it_is_computed_with_the_weights_that_the_method_evaluates(index):
    @served(index)
    async def main(bench):
        own = dict(bench.stage.model.named_parameters())
        other = {name: (0.5 * weight).detach().float() for name, weight in own.items()}
        request = measure(bench, 1)
        _, (before,) = await bench.ask(*request)
        bench.server.held_out.evaluated = lambda: other
        _, (evaluated,) = await bench.ask(*request)
        _, forward = await bench.ask(*bench.forward(2))
        assert forward == (bytes_of(bench.stage.forward(bench.inside(2))),) or index
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(other[name])
        bench.server.held_out.evaluated = None
        assert (await bench.ask(*request))[1] == (evaluated,) != (before,)

    main()


@served(2)
async def test_it_changes_no_gradient_and_no_account(bench):
    other = Bench(2)
    async with other.running():
        await other.merge(7)
        await asyncio.gather(bench.merge(7), bench.ask(*measure(bench, 7)))
        mine, wanted = bench.server.accounts.take(), other.server.accounts.take()
    assert mine.staged.tokens == wanted.staged.tokens == TOKENS
    for name, x in wanted.staged.gradients.items():
        assert torch.equal(mine.staged.gradients[name], x)


@pytest.mark.parametrize("index", range(3))
def test_it_is_admitted_however_old_its_round_is(index):
    bench = Bench(index)
    assert bench.admit(*measure(bench, 1, epoch=-1)) is None
    assert type(bench.admit(*bench.forward(1, epoch=-1))).__name__ == "Stale"


REFUSED = {
    "another stage": (1, {"stage": 2}, lambda sent: sent),
    "another source": (1, {"source": -1}, lambda sent: sent),
    "no activation": (1, {}, lambda sent: sent[:1]),
    "targets in the middle": (1, {}, lambda sent: [*sent, bytes(TOKENS)]),
    "no targets at the end": (2, {}, lambda sent: sent[:-1]),
    "too many targets": (2, {}, lambda sent: [*sent[:-1], bytes(TOKENS + 1)]),
}


@pytest.mark.parametrize(("index", "changes", "sent"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused_before_its_payloads_come(index, changes, sent):
    bench = Bench(index)
    request, payloads = measure(bench, 1, **changes)
    assert isinstance(bench.admit(request, sent(payloads)), Refused)


def test_a_codec_that_is_not_read_and_a_full_queue_are_said():
    @served(1, queue=1, together=1)
    async def main(bench):
        unknown = measure(bench, 1, came=CodecId("other", 1, b""))
        assert isinstance(bench.admit(*unknown), Foreign)
        replies = await asyncio.gather(*(bench.ask(*measure(bench, n)) for n in range(4)))
        answers = [type(answer) for answer, _ in replies]
        assert set(answers) == {Done, Busy}

    main()


@served(2)
async def test_false_targets_are_refused_and_the_others_are_answered(bench):
    request, payloads = measure(bench, 1)
    false = [*payloads[:-1], b"\xff" * TOKENS]
    first, second = await asyncio.gather(bench.ask(request, false), bench.ask(*measure(bench, 2)))
    assert isinstance(first[0], Refused)
    assert isinstance(second[0], Done)


@pytest.mark.parametrize("index", [0, 1])
def test_an_output_that_is_not_finite_is_said_and_blames_nobody(index):
    @served(index)
    async def main(bench):
        with torch.no_grad():
            for weight in bench.stage.model.parameters():
                weight.fill_(torch.nan)
        assert (await bench.ask(*measure(bench, 1)))[0] == NotFinite()
        assert isinstance((await bench.ask(*bench.forward(1)))[0], Refused)

    main()


@served(2)
async def test_a_loss_that_is_not_finite_is_told_as_it_is(bench):
    with torch.no_grad():
        for weight in bench.stage.model.parameters():
            weight.fill_(torch.nan)
    _, (payload,) = await bench.ask(*measure(bench, 1))
    assert bench.edges.unpack_losses(payload).isnan().all()


@pytest.mark.parametrize("index", [0, 2])
def test_on_a_device_it_answers_as_on_the_cpu(single, index):
    found = []
    for device in (single, None):

        @served(index, dtype=torch.float32, device=device)
        async def main(bench):
            answer, (payload,) = await bench.ask(*measure(bench, 2))
            assert isinstance(answer, Done)
            dtype = torch.float64 if bench.stage.is_last else torch.float32
            found.append(torch.frombuffer(bytearray(payload), dtype=dtype))

        main()
    torch.testing.assert_close(*found)


@served(1, codec="aqsgd4", dtype=torch.float32)
async def test_a_codec_that_remembers_samples_remembers_none_of_it(bench):
    ends = bench.server.passes.ends
    assert isinstance(bench.edges.codec, AqSgd)
    request, payloads = measure(bench, 1)
    x = bench.values(1, 1)
    sent = ends.output("t", x, changed(request, {"stage": 0, "source": -1}), bench.tokens(1))
    answer, (output,) = await bench.ask(request, [payloads[0], sent])
    assert isinstance(answer, Done)
    read = ends.input("t", output, changed(request, {"stage": 2, "source": 1}), bench.tokens(1))
    wanted = bench.stage.forward(x.half().float())
    torch.testing.assert_close(read, wanted, rtol=2e-3, atol=2e-3)
    assert ends.held_bytes == 0
    difference = bytes([2]) + sent[1:]
    assert isinstance((await bench.ask(request, [payloads[0], difference]))[0], Refused)
