"""An end stage that loses all its servers gets its tables back, bit for bit, from its neighbour.

The tables are the embedding, or the norm and the head.
"""

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from worlds import pipeline_audit
from worlds.pipeline_audit import MODEL, TOKENS, Audit

from farflock.node.pipeline.lifecycle.end_copies import KEEPERS, EndCopies, _Wanted, ends_beside
from farflock.node.pipeline.recovery.rebuild import LR_BUMP, end_tensors
from farflock.node.run.split import even
from farflock.node.simulate.pipeline import PeerRole, PipelineWorld, parts
from farflock.node.train.state_sync import CorruptSnapshot, encode_state

pytestmark = pytest.mark.usefixtures("quiet_log")
BATCH = 4
EMBEDDING = "model.embed_tokens.weight"
EQUAL = structs.replace(MODEL, layers=6)


@pytest.fixture
def kept(monkeypatch):
    """Every copy that was kept: (peer, end, round, tensors)."""
    found, keep = [], EndCopies.keep

    async def keeping(self, end):
        await keep(self, end)
        if end in self._copies:
            copy = self._copies[end]
            found.append((self._peer.me, end, copy.round, copy.tensors))

    monkeypatch.setattr(EndCopies, "keep", keeping)
    return found


def audited(stages, who, every, during, batches=14, model=EQUAL, **options):
    made = replace(pipeline_audit.plan(0, batches * BATCH * TOKENS, rate=0.05), model=model)
    cut = pipeline_audit.pipeline(stages, BATCH, end_copies=every, **options)
    world = PipelineWorld(
        who,
        batches * BATCH * TOKENS,
        view_s=2.0,
        away_s=(3.0, 8.0),
        limit_s=600,
    )
    one = Audit(made, replace(cut, stages=tuple(even(model, stages))), world)
    one.begun_anew = True
    return one.run(lambda sim: during(one, sim)).check().check_finished()


def ends_of(weights):
    return {name: x.float() for name, x in end_tensors(weights).items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.ci_more)])
def test_an_end_stage_that_dies_out_has_its_embedding_or_head_again_bit_for_bit(lost, kept):
    async def die_out(one, sim):
        while not sim.settled or not any(end == lost and number >= 2 for _, end, number, _ in kept):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for number in (lost, lost + 3):
            sim.kill(number, 2.0 + number)

    one = audited(3, parts(3, 2, 1), 1, die_out)
    begun = [entry for entry in one.tale.fields("stage") if entry["round"] >= 0]
    assert {(entry["stage"], entry["from"]) for entry in begun} == {(lost, "copy")}, begun
    after = begun[0]["round"]
    rounds = sorted(number for stage, number in one.versions if stage == lost and number <= after)
    died = {
        number: [ends_of(weights) for weights in one.versions[lost, number]] for number in rounds
    }
    later = [life for life in one.lives[6:] if life.stage == lost and life.weights]
    assert later
    first = ends_of(later[0].weights[min(later[0].weights)])
    came_from = [number for number in rounds if any(same(first, ends) for ends in died[number])]
    assert came_from, "it is of no round of the stage"
    assert max(came_from) >= after - 2, "the copy was old"
    assert later[0].serving.training_task.rate_factor() == LR_BUMP
    newest = max(one.named[lost])
    assert newest >= after + 3, "the stage did not go on"


def test_a_few_servers_of_the_neighbour_keep_the_end_s_tensors_every_n_rounds(kept):
    async def end_soon(one, sim):
        while min((len(one.named[stage]) for stage in range(3)), default=0) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        sim.end()

    ends = PeerRole(0), PeerRole(2)
    who = (*ends, *[PeerRole(1)] * (KEEPERS + 1), PeerRole(trains=True))
    one = audited(3, who, 3, end_soon, batches=10**6, model=MODEL)
    assert {end for _, end, _, _ in kept} == {0, 2}
    assert len({peer for peer, _, _, _ in kept}) == KEEPERS, "all of them did"
    for peer, end, number, tensors in kept:
        assert same(ends_of(tensors), ends_of(one.versions[end, number][0])), (peer, end, number)
    for keeper, end in {(peer, end) for peer, end, _, _ in kept}:
        rounds = sorted({number for peer, of, number, _ in kept if (peer, of) == (keeper, end)})
        assert len(rounds) >= 2
        assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(rounds))


def test_without_copies_nothing_is_kept_and_a_lost_end_begins_with_initial_weights(kept):
    async def die_out(one, sim):
        while not sim.settled or len(one.named[0]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        sim.kill(0, 2.0)

    one = audited(3, parts(3, 1, 1), 0, die_out, batches=8)
    assert kept == []
    begun = [entry for entry in one.tale.fields("stage") if entry["round"] >= 0]
    assert {entry["from"] for entry in begun} == {"initial"}
    assert "no peer has an exact copy of its embedding" in begun[0]["why"]


@pytest.mark.ci_more
def test_where_stages_change_places_a_lost_one_begins_as_its_partner(kept):
    async def die_out(one, sim):
        while not sim.settled or len(one.named[1]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for number in (1, 5):
            sim.kill(number, 2.0 + number)

    one = audited(4, parts(4, 2, 1), 0, die_out, policy="swap", model=MODEL)
    begun = [entry for entry in one.tale.fields("stage") if entry["round"] >= 0]
    assert {(entry["stage"], entry["from"]) for entry in begun} == {(1, "copy")}, begun
    assert "copy of stage 2, which was trained to stand in for it" in begun[0]["why"]


@pytest.mark.parametrize(
    ("stages", "beside"),
    [(1, [()]), (2, [(1,), (0,)]), (3, [(), (0, 2), ()]), (5, [(), (0,), (), (4,), ()])],
)
def test_ends_are_kept_by_their_neighbours(stages, beside):
    assert [ends_beside(index, stages) for index in range(stages)] == beside


def test_of_what_an_end_hands_out_nothing_but_its_own_tensors_is_kept():
    span = even(EQUAL, 3)[0]
    wanted = _Wanted(EQUAL, span)
    embedding = torch.ones(EQUAL.vocab_size, EQUAL.dim)
    assert same(wanted.tensors(encode_state({EMBEDDING: embedding}, 4, 0)), {EMBEDDING: embedding})
    for other in (
        {},
        {EMBEDDING: embedding[:-1].clone()},
        {EMBEDDING: embedding.double()},
        {EMBEDDING: embedding, "more": embedding.clone()},
        {"another": embedding},
    ):
        with pytest.raises(CorruptSnapshot, match="holds other tensors"):
            wanted.tensors(encode_state(other, 4, 0))
