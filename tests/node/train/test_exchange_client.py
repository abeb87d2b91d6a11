"""A method's exchange over two real peers and back: the mean, all tensors, and what is refused."""

import asyncio

import pytest
import torch

from farflock.compression.codec import UnencodableTensor
from farflock.node.train import microbatch_ids as notes
from farflock.node.train.driver import Claim
from farflock.node.train.exchange_client import ExchangeClient, OutOfStep
from farflock.optimizers.method import All, Exchange, ExchangeKey, Members, RandomGroups
from farflock.swarm.protocol.entitlement import Entitlement
from farflock.swarm.sim.virtual_time import run_virtual


def exchange(values, number=0, kind="mean", group=None, **options):
    tensors = {
        "a": torch.as_tensor(values, dtype=torch.float32),
        "b": torch.full((2, 2), float(values[0])),
    }
    return Exchange(
        ExchangeKey("s", number),
        kind,
        group or All(),
        tensors,
        codec="fp32",
        return_codec="fp32",
        deadline_s=8.0,
        **options,
    )


async def exchanged(client, asked, state=b"", notes=b""):
    """Encode, exchange and decode, as the loop does."""
    offer = client.encode(asked, Claim(10, state, notes))
    return client.decode(asked.key, await client.exchange(offer), offer.payloads)


def between(bench, text, work):
    """`work(clients)` with two members of one run."""
    made = bench(text, "local", peers=2)

    async def main():
        async with made.peer(0).running() as one, made.peer(1).running() as other:
            one.found()
            await other.join([made.record(0)], 30.0)
            while not (one.membership.is_member and other.membership.is_member):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.5)
            first = max(peer.context.views.newest.first_round for peer in (one, other))
            entitled = Entitlement(weight=3.0)
            clients = [ExchangeClient(peer, 3, entitlement=entitled) for peer in (one, other)]
            return await work(clients, first)

    return run_virtual(main())


def carried(bench, text, *exchanges, states=(b"", b"")):
    async def work(clients, first):
        jobs = []
        for client, make, state in zip(clients, exchanges, states, strict=True):
            asked = make(first)
            client.open(asked, first - 1)
            jobs.append(exchanged(client, asked, state))
        return await asyncio.gather(*jobs)

    return between(bench, text, work)


def test_the_mean_is_weighted_and_the_same_for_both(bench, text):
    one, other = carried(
        bench,
        text,
        lambda number: exchange([1.0, 2.0], number, weight=1.0),
        lambda number: exchange([5.0, 6.0], number, weight=3.0),
    )
    assert one.status == other.status == "ok"
    assert torch.equal(one.mean["a"], torch.tensor([4.0, 5.0]))
    assert torch.equal(one.mean["b"], torch.full((2, 2), 4.0))
    assert all(torch.equal(one.mean[name], other.mean[name]) for name in one.mean)
    assert one.participants == other.participants == tuple(sorted(one.participants))
    assert one.tokens == other.tokens == 20
    assert sorted(one.weights) == [1.0, 3.0]
    assert torch.equal(one.sent["a"], torch.tensor([1.0, 2.0]))
    assert one.taken == {"a": [(0, 2)], "b": [(0, 4)]}


def test_a_gather_gives_everybody_s_tensors_and_their_mean(bench, text):
    one, other = carried(
        bench,
        text,
        lambda number: exchange([1.0, 2.0], number, kind="gather"),
        lambda number: exchange([3.0, 6.0], number, kind="gather"),
    )
    assert sorted(float(tensors["a"][0]) for tensors in one.gathered.values()) == [1.0, 3.0]
    assert torch.equal(one.mean["a"], torch.tensor([2.0, 4.0]))
    assert list(one.gathered) == list(other.gathered) == list(one.participants)


def test_a_pair_swaps(bench, text):
    pair = RandomGroups(2)
    one, other = carried(
        bench,
        text,
        lambda number: exchange([1.0, 2.0], number, group=pair),
        lambda number: exchange([3.0, 6.0], number, group=pair),
    )
    assert one.status == other.status == "ok"
    assert torch.equal(one.mean["a"], torch.tensor([2.0, 4.0]))
    assert torch.equal(other.mean["a"], one.mean["a"])


def test_a_peer_whose_state_is_not_the_group_s_is_told(bench, text):
    async def work(clients, first):
        jobs = []
        for client, state in zip(clients, (b"x" * 32, b"y" * 32), strict=True):
            asked = exchange([1.0, 2.0], first)
            client.open(asked, first - 1)
            jobs.append(exchanged(client, asked, state))
        return await asyncio.gather(*jobs, return_exceptions=True)

    answers = between(bench, text, work)
    assert [type(answer) for answer in answers].count(OutOfStep) == 1, (
        "the one that is not with the majority"
    )


def test_a_tensor_that_is_not_finite_never_leaves(bench, text):
    async def work(clients, first):
        asked = exchange([float("nan"), 1.0], first)
        clients[0].open(asked, first - 1)
        with pytest.raises(UnencodableTensor):
            await exchanged(clients[0], asked)

    between(bench, text, work)


@pytest.mark.parametrize("group", [RandomGroups(3), Members(("a", "b"))])
def test_a_group_that_cannot_be_carried_is_refused_when_its_stream_opens(bench, text, group):
    async def work(clients, first):
        with pytest.raises(ValueError, match="not supported yet; use"):
            clients[0].open(exchange([1.0], group=group))

    between(bench, text, work)


def means_of_rounds(bench, text, rounds, *, compensate):
    """Results of two constant contributions round after round; the return has two magnitudes."""

    async def work(clients, first):
        moved = torch.zeros(4)
        for number in range(first, first + rounds):
            jobs = []
            for client, sign in zip(clients, (1.0, 3.0), strict=True):
                tensors = {"x": sign * torch.tensor([1.0, 0.1, 0.0, -0.02])}
                asked = Exchange(
                    ExchangeKey("s", number),
                    "mean",
                    All(),
                    tensors,
                    codec="fp32",
                    return_codec="sign",
                    compensate=compensate,
                )
                if number == first:
                    client.open(asked, first - 1)
                jobs.append(exchanged(client, asked))
            one, other = await asyncio.gather(*jobs)
            assert torch.equal(one.mean["x"], other.mean["x"])
            moved += one.mean["x"]
        return moved / rounds, [client.feedback() for client in clients]

    return between(bench, text, work)


def test_over_many_rounds_a_compensated_mean_loses_nothing_and_another_one_does(bench, text):
    wanted = torch.tensor([2.0, 0.2, 0.0, -0.04])
    mean, memories = means_of_rounds(bench, text, 40, compensate=True)
    torch.testing.assert_close(mean, wanted, atol=0.1, rtol=0)
    (feedback,) = [memory for memory in memories if memory]  # one of them reduces, in all rounds
    torch.testing.assert_close(mean + feedback["s.0.0"] / 40, wanted, atol=1e-5, rtol=0)
    mean, memories = means_of_rounds(bench, text, 40, compensate=False)
    assert float((mean - wanted).abs().max()) > 0.5
    assert not any(memories)


# Streams of stages, with notes of what each contribution is made of.

MINE, YOURS = [("t", 1), ("t", 3)], [("t", 2), ("u", 1)]


def noted(bench, text, one, other, kind="mean", number=0):
    """The results of two contributions (values, notes) to stage 2; None only brings replays."""

    async def work(clients, first):
        clients = [ExchangeClient(client.peer, 3, 2) for client in clients]
        jobs = []
        for client, part in zip(clients, (one, other), strict=True):
            client.open(exchange([0.0, 0.0], number, kind), number - 1, noted=True)
            if part is not None:
                jobs.append(exchanged(client, exchange(part[0], number, kind), notes=part[1]))
        results = await asyncio.gather(*jobs)
        if other is None:
            while (missed := clients[1].replay("s", number)) is None:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.5)
            results.append(missed)
        return results

    return between(bench, text, work)


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_what_contributions_are_made_of_is_agreed_upon_with_their_mean(bench, text, kind):
    parts = ([1.0, 2.0], notes.written(MINE)), ([3.0, 6.0], notes.written(YOURS))
    one, other = noted(bench, text, *parts, kind=kind)
    assert one.status == other.status == "ok"
    assert notes.read(one.notes) == notes.read(other.notes) == sorted(MINE + YOURS)
    assert torch.equal(one.mean["a"], torch.tensor([2.0, 4.0]))
    assert one.taken == {"a": [(0, 2)], "b": [(0, 4)]}, "the notes are no part of the tensors"
    assert torch.equal(one.sent["a"], torch.tensor([1.0, 2.0]))
    if kind == "gather":
        assert sorted(float(tensors["a"][0]) for tensors in one.gathered.values()) == [1.0, 3.0]


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_a_member_without_a_contribution_hears_what_the_round_was_made_of(bench, text, kind):
    one, missed = noted(bench, text, ([1.0, 2.0], notes.written(MINE)), None, kind=kind)
    assert notes.read(missed.notes) == notes.read(one.notes) == MINE
    assert torch.equal(missed.mean["a"], torch.tensor([1.0, 2.0]))
    assert missed.sent is None
    assert missed.taken == {}


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_a_contribution_whose_notes_cannot_be_read_is_left_out_as_a_whole(bench, text, kind):
    """Otherwise its gradient would count and no peer would know."""
    one, other = noted(
        bench, text, ([1.0, 2.0], notes.written(MINE)), ([3.0, 6.0], b"\xc1"), kind=kind
    )
    assert one.status == other.status == "partial"
    assert notes.read(one.notes) == MINE
    assert torch.equal(one.mean["a"], torch.tensor([1.0, 2.0]))
    assert not any(other.taken.values())


def test_the_notes_of_a_round_that_failed_are_empty(bench, text):
    one, other = noted(bench, text, ([1.0, 2.0], b"\xc1"), ([3.0, 6.0], b"\xc1"))
    assert one.status == other.status == "failed"
    assert one.notes == other.notes == b""


@pytest.mark.parametrize(("with_notes", "wants"), [(True, "last"), (False, "none")])
def test_a_member_that_watches_another_stage_wants_its_notes_alone(bench, text, with_notes, wants):
    async def work(clients, first):
        client = ExchangeClient(clients[0].peer, 3, 5)
        name = client.look_on(exchange([0.0, 0.0]), noted=with_notes)
        return name, client.peer.rounds.streams[name].stream

    name, stream = between(bench, text, work)
    assert name == "s/5"
    assert (stream.stage, stream.wants, stream.terms.shards) == (5, wants, 1 + with_notes)
    assert not stream.terms.uniform or with_notes


def test_notes_go_with_streams_that_have_them_and_with_no_others(bench, text):
    one, other = carried(
        bench,
        text,
        lambda number: exchange([1.0, 2.0], number),
        lambda number: exchange([3.0, 6.0], number),
    )
    assert one.notes == other.notes == b""
