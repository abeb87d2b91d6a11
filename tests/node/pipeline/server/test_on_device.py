"""A stage server whose stage is on an accelerator, asked directly: what it copies, keeps and sums.

The accelerator is worlds/card.py, or a real one."""

import asyncio
import logging

import pytest
import torch
from worlds.card import CARD, is_on_device
from worlds.node_stage_server import MODEL, TOKENS, Bench

from farflock.node.model.device import Device, choose
from farflock.node.pipeline.passes.requests import Done
from farflock.swarm.sim.virtual_time import run_virtual

ACTIVATION = TOKENS * MODEL.dim * 4  # bytes of float32
IDS = TOKENS * 8  # int64
FINITE, LOSS = 1, 4  # bytes that a backward pass reads of its results
FIRST, LAST = 0, 2


def asked(main, index=1, **options):
    """Return what `main(bench)` returns next to a running server in float32."""

    async def whole():
        async with Bench(index, dtype=torch.float32, **options).running() as bench:
            return await main(bench)

    return run_virtual(whole())


def values(payload):
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)


async def passed(bench):
    """Return the payloads and the loss of some passes, and the sum of two gradients."""
    payloads = [] if bench.stage.is_last else list((await bench.ask(*bench.forward(1)))[1])
    answer, back = await bench.put_aside(1)
    for number in (2, 3):
        await bench.merge(number)
    taken = bench.server.accounts.sums.take().staged.gradients
    return [*payloads, *back], answer.loss_sum, taken


@pytest.mark.parametrize("index", [1, LAST])
def test_answers_and_sums_are_those_of_a_server_on_the_cpu(single, index):
    there, here = (asked(passed, index, device=device) for device in (single, None))
    for one, other in zip(there[0], here[0], strict=True):
        torch.testing.assert_close(values(one), values(other))
    assert there[1] == pytest.approx(here[1])
    for name, x in there[2].items():
        assert is_on_device(x)
        torch.testing.assert_close(x.cpu(), here[2][name])


@pytest.mark.parametrize("index", [FIRST, 1])
def test_a_microbatch_copies_what_passes_the_edges_and_tokens_once_and_no_weights(
    single, index, card
):
    async def count(bench):
        await bench.put_aside(1)
        for number in (2, 3):  # the first pass of all measures what its graph would hold
            CARD.reset_counters()
            await bench.ask(*bench.forward(number))
            inside = IDS if index == FIRST else ACTIVATION
            assert (CARD.to_card_bytes, CARD.from_card_bytes) == (inside, ACTIVATION)
            assert not CARD.waits
        CARD.reset_counters()
        await bench.put_aside(3)
        assert bench.server.passes.graphs.used == 1
        assert CARD.to_card_bytes == ACTIVATION, "its input is there already"
        assert CARD.from_card_bytes == FINITE + (0 if index == FIRST else ACTIVATION)
        CARD.reset_counters()
        await bench.merge(4)
        assert CARD.largest_from_card_bytes <= ACTIVATION

    asked(count, index, device=single)


def test_the_last_stage_copies_its_input_the_targets_and_a_loss(single, card):
    async def count(bench):
        CARD.reset_counters()
        await bench.put_aside(1)
        assert CARD.to_card_bytes == ACTIVATION + IDS
        assert CARD.from_card_bytes == ACTIVATION + FINITE + LOSS

    asked(count, LAST, device=single)


def test_a_graph_stays_there_and_gives_the_bits_of_a_pass_computed_again(accelerator):
    async def both_ways(bench):
        graphs, made = bench.server.passes.graphs, []
        await bench.ask(*bench.forward(1))
        for attempt, room in enumerate((0, 2**20)):
            graphs.max_bytes = room
            await bench.ask(*bench.forward(2))
            assert len(graphs) == bool(room)
            _, payloads = await bench.put_aside(2, attempt)
            (pending,) = bench.server.pending.gradients.values()
            made.append((pending.staged.gradients, payloads))
            bench.server.pending.revoke(("t", 2), attempt)
        assert graphs.used == 1
        return made

    again, kept = asked(both_ways, device=choose())
    assert again[1] == kept[1]
    assert all(torch.equal(x, kept[0][name]) for name, x in again[0].items())


def test_in_lower_precision_sums_stay_float32(accelerator):
    assert choose().precision == "bf16"
    there, here = (asked(passed, device=device)[2] for device in (choose(), None))
    for name, x in there.items():
        assert x.dtype == torch.float32
        away = (x.cpu() - here[name]).norm() / here[name].norm()
        assert 1e-5 < away < 0.05, name


def test_weights_of_double_precision_are_multiplied_in_it(accelerator):
    stages = [Bench(device=device).stage for device in (choose(), None)]
    torch.testing.assert_close(*(stage.forward(Bench().inside(1)).cpu() for stage in stages))


def test_without_native_bf16_stages_multiply_in_float32(single):
    devices = Device(single.place, "Half", "fp16"), single
    there, here = (Bench(device=device, dtype=torch.float32) for device in devices)
    x = there.inside(1)
    assert torch.equal(there.stage.forward(x).cpu(), here.stage.forward(x).cpu())


def test_forward_passes_that_wait_are_one_call_of_the_model(single, card):
    async def at_once(bench):
        bench.server.passes.graphs.max_bytes = 0  # as if kept graphs filled their room
        await bench.ask(*bench.forward(1))
        sizes = []
        bench.stage.model.register_forward_pre_hook(lambda model, given: sizes.append(given[0]))
        CARD.reset_counters()
        replies = await asyncio.gather(*(bench.ask(*bench.forward(n)) for n in range(2, 6)))
        assert CARD.to_card_bytes == CARD.from_card_bytes == 4 * ACTIVATION
        assert [len(x) for x in sizes] == [4]
        for number, (answer, (payload,)) in enumerate(replies, 2):
            assert isinstance(answer, Done)
            alone = bench.stage.forward(bench.inside(number)).flatten().cpu()
            torch.testing.assert_close(values(payload), alone)

    asked(at_once, device=single, together=4)


async def forwarded(bench, room=None):
    """Return the outputs of some microbatches and the gradients of one. Before the last one the
    device has so much room left (None: enough)."""
    outputs = [await bench.ask(*bench.forward(number)) for number in range(1, 6)]
    if room is not None:
        bench.stage.release()
        CARD.leave_free(room)
    outputs += [await bench.ask(*bench.forward(6)), await bench.put_aside(2)]
    return [values(one) for _, payloads in outputs for one in payloads], bench.server.passes.graphs


def test_a_pass_that_runs_out_of_memory_drops_kept_graphs_and_is_computed_again(
    single, caplog, card
):
    caplog.set_level(logging.WARNING)
    wanted, graphs = asked(forwarded, device=single)
    each = graphs.size_bytes // len(graphs)
    assert (len(graphs), graphs.used) == (4, 1)
    found, graphs = asked(lambda bench: forwarded(bench, each // 2), device=single)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert graphs.max_bytes == 2 * each
    assert (len(graphs), graphs.used) == (1, 0), "the last one, whose pass was taken again"
    assert "ran out of memory in a pass: 4 kept graphs are dropped" in caplog.text
