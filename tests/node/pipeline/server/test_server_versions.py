"""A stage server that keeps versions: of its weights, and of its codec."""

import asyncio
import dataclasses

import pytest
import torch
from worlds.node_stage_server import EPOCH, MODEL, SPANS, TOKENS, Bench, bytes_of, served

from farflock.compression.subspace import Basis, Subspace
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.constraint import Constraint
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Done,
    Forward,
    Gone,
    Refused,
    Stale,
    Unknown,
    Version,
)
from farflock.node.pipeline.server.weight_versions import ORIGIN
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.sim.virtual_time import run_virtual

# versions


@served(versions=3, staleness=2)
async def test_a_backward_pass_is_that_of_the_weights_that_its_forward_pass_had(bench):
    answer, _ = await bench.ask(*bench.forward(1))
    assert answer.version == Version(EPOCH)
    wanted = bench.stage.backward(bench.inside(1), bench.outside(1))
    bench.apply_round()
    bench.apply_round()
    newest = bench.stage.backward(bench.inside(1), bench.outside(1))
    for number, version, expected in (
        (1, Version(EPOCH), wanted),
        (2, None, None),
        (3, Version(EPOCH + 2), None),
    ):
        done, payloads = await bench.ask(*bench.backward(number, version=version))
        assert done.version == (version or Version(EPOCH + 2))
        if expected is not None:
            assert payloads == (bytes_of(expected.input_gradient),)
            assert payloads != (bytes_of(newest.input_gradient),)
            staged = bench.server.pending.gradients["t", number].staged
            assert all(
                torch.equal(x, expected.staged.gradients[name])
                for name, x in staged.gradients.items()
            )


@served(versions=2, staleness=2)
async def test_weights_that_are_not_here_are_named_as_gone_before_anything_is_sent(bench):
    bench.apply_round()
    bench.apply_round()
    for version, late in ((EPOCH, False), (EPOCH - 1, True), (EPOCH + 3, False)):
        assert bench.admit(*bench.backward(1, version=Version(version))) == Gone(EPOCH + 2, late)
    assert bench.admit(*bench.backward(1, version=Version(EPOCH + 1, 9))) == Gone(EPOCH + 2, True)
    assert bench.admit(*bench.backward(1, version=Version(EPOCH + 1))) is None
    bench.marks[ORIGIN] = 9  # the stage was started again
    assert bench.admit(*bench.backward(1, version=Version(EPOCH + 1))) == Gone(EPOCH + 2, True)
    assert bench.server.served["gone"] == 5


@served(versions=2, staleness=1)
async def test_weights_that_go_while_a_pass_waits_are_gone_and_its_place_is_free(bench):
    asking = asyncio.create_task(bench.ask(*bench.backward(1, version=Version(EPOCH))))
    first = asyncio.create_task(bench.ask(*bench.backward(2)))
    bench.apply_round()
    bench.apply_round()
    assert (await asking)[0] == Gone(EPOCH + 2, True)
    assert isinstance((await first)[0], Done)
    assert len(bench.server.pending.gradients) == 1
    assert bench.server.pending.staging.taken == 1


@served(versions=2, staleness=1)
async def test_what_is_too_late_when_its_step_comes_is_left_out_and_named(bench):
    await bench.merge(1)
    bench.apply_round()
    await bench.merge(2)
    bench.apply_round()
    await bench.merge(3)
    assert bench.server.accounts.tokens == 2 * TOKENS, "what will be left out fills no batch"
    taken = bench.server.accounts.take()
    assert (taken.staged.tokens, taken.discarded) == (2 * TOKENS, 0)
    assert bench.server.served["late"] == 1
    assert bench.server.accounts.tokens == 2 * TOKENS
    noted = bench.server.accounts.brought(EPOCH + 3)
    assert notes.read_ages(noted) == {("t", 1): notes.LATE, ("t", 2): 1, ("t", 3): 0}
    bench.apply_round(noted)
    assert bench.server.accounts.tokens == 0
    assert not bench.server.accounts.taken
    assert not bench.server.accounts.late


@served(versions=2, staleness=1)
async def test_what_came_back_from_a_round_is_given_up_as_a_whole_once_a_part_of_it_is_too_late(
    bench,
):
    await bench.merge(1)
    bench.apply_round()
    await bench.merge(2)
    assert bench.server.accounts.take().staged.tokens == 2 * TOKENS
    assert notes.read_ages(bench.server.accounts.brought(EPOCH + 2)) == {("t", 1): 1, ("t", 2): 0}
    bench.apply_round()  # without it
    await bench.merge(3)
    taken = bench.server.accounts.take()
    assert (taken.staged.tokens, taken.discarded) == (TOKENS, 2)
    assert notes.read_ages(bench.server.accounts.brought(EPOCH + 3)) == {
        ("t", 1): notes.LATE,
        ("t", 2): notes.LATE,
        ("t", 3): 0,
    }


# versions of a codec

COLUMNS = Basis.drawn(MODEL.dim, 2, 5).columns_DK
TABLES = {
    version: Basis(
        version,
        COLUMNS,
        torch.full((MODEL.vocab_size, MODEL.dim), float(version)),
        torch.empty(0, MODEL.dim),
    )
    for version in (1, 2, 3)
}


def versioned_bench(index=1, later=(3,)):
    """A server that reads version 2 of a subspace codec and `later` ones.

    Its outputs lie in the subspace.
    """
    bench = Bench(index)
    codec = SubspaceVersions(Subspace(TABLES[2], None, None))
    for version in later:
        codec.hold(TABLES[version])
    bench.edges = dataclasses.replace(bench.edges, codec=codec)
    bench.server = bench.made()
    names = [name for name, _ in bench.stage.model.named_parameters()]
    Constraint.on(names, SPANS, TABLES[2]).begin(bench.stage.model)
    return bench


def in_version(bench, number, version, made):
    """A request, and its payloads as another stage sends them in this version."""
    request, payloads = made
    inside = torch.randn(1, TOKENS, 2, generator=torch.Generator().manual_seed(number)).double()
    tokens = bench.tokens(number)
    x = TABLES[version].fixed_VD.double()[tokens] + inside @ TABLES[version].exact_DK.T
    speaker = dataclasses.replace(
        bench.edges, codec=SubspaceVersions(Subspace(TABLES[version], None, None))
    )
    payloads[1] = speaker.output(
        x, Forward(number, bench.index - 1, bench.index - 2, EPOCH), tokens
    )
    if len(payloads) > 2 and not bench.stage.is_last:
        gradient = bench.values(number, 2)
        payloads[2] = speaker.input_gradient(
            gradient, Backward(number, bench.index + 1, bench.index, EPOCH, 1), tokens, x
        )
    return request, payloads


def test_a_server_answers_in_the_version_that_came_and_many_versions_go_through_it_at_once():
    async def main():
        async with versioned_bench().running() as bench:
            asked = [
                bench.ask(*in_version(bench, number, 2 + number % 2, bench.forward(number)))
                for number in range(4)
            ]
            for number, (answer, payloads) in enumerate(await asyncio.gather(*asked)):
                assert isinstance(answer, Done)
                assert bench.edges.codec.version_of(payloads[0]) == 2 + number % 2
            answer, payloads = await bench.ask(*in_version(bench, 9, 3, bench.backward(9)))
            assert isinstance(answer, Done)
            assert bench.edges.codec.version_of(payloads[0]) == 3

    run_virtual(main())


@pytest.mark.parametrize("index", [1, 2])
def test_a_pass_in_an_outdated_version_must_start_again_or_is_gone_and_nothing_is_staged(
    index,
):
    async def main():
        async with versioned_bench(index).running() as bench:
            if index == 1:
                answer, payloads = await bench.ask(*in_version(bench, 1, 1, bench.forward(1)))
                assert (answer, payloads) == (Stale(EPOCH), ())
            answer, payloads = await bench.ask(*in_version(bench, 1, 1, bench.backward(1)))
            assert (answer, payloads) == (Gone(EPOCH, late=True), ())
            assert not bench.server.pending.gradients
            assert isinstance(await bench.say(Confirm(1, index, 1)), Unknown)

    run_virtual(main())


def test_what_came_in_a_version_that_is_not_here_yet_is_refused_by_name_and_done_once_it_is():
    async def main():
        async with versioned_bench(later=()).running() as bench:
            codec = bench.edges.codec
            for made in (bench.forward, bench.backward):
                answer, _ = await bench.ask(*in_version(bench, 1, 3, made(1)))
                assert isinstance(answer, Refused)
                assert "version 3" in answer.why
                assert "not here yet" in answer.why
            codec.hold(TABLES[3])
            answer, _ = await bench.ask(*in_version(bench, 1, 3, bench.backward(1, attempt=2)))
            assert isinstance(answer, Done)

    run_virtual(main())
