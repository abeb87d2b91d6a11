"""Downloads of versions of the frozen embedding: what a keeper asks for, accepts and hands on."""

import asyncio
import logging

import pytest
import torch

from farflock.compression.subspace import Subspace
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.contrib import embedding_sync
from farflock.node.pipeline.contrib.embedding_sync import (
    FIND_TIMEOUT_S,
    HEAD_BYTES,
    NAME,
    EmbeddingSync,
)
from farflock.node.pipeline.lifecycle.features import frozen_embedding
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.passes.constraint import EMBEDDING, ConstrainedReplica, Constraint
from farflock.node.run.basis import run_basis
from farflock.node.run.split import even
from farflock.node.run.terms import EmbeddingSchedule
from farflock.node.state.cut import OpenCuts
from farflock.node.train.state_sync import decode_state, encode_state
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=30, dim=16, layers=6, heads=2, kv_heads=1, ffn_dim=24, context=8, tied=False
)
STAGES = even(MODEL, 3)
BASIS = run_basis(4, 16, 5, 30)


def table(seed):
    return torch.randn(30, 16, generator=torch.Generator().manual_seed(seed))


def offer(version, content=None):
    return encode_state({NAME: table(version)} if content is None else content, version, 0)


class Rounds:
    names = ("delta/0",)

    def __init__(self, newest):
        self.at = newest

    def newest(self, name):
        assert name == "delta/0"
        return self.at


class KeeperWorld:
    """A keeper whose swarm is what a test says.

    `there` are the snapshots by stage and name, `others` how many peers serve each stage. A peer
    that is not there never answers.
    """

    def __init__(self, newest=-1, every=1, others=(1, 1, 1), monkeypatch=None):
        self.rounds, self.snapshots, self.others = Rounds(newest), self, others
        self.there, self.asked, self.served, self.versions, self.distrusted = {}, [], {}, {}, []
        self.computing, self.cuts = False, OpenCuts()
        codec = SubspaceVersions(Subspace(BASIS, None, None))
        self.keeper = EmbeddingSync(
            codec, EmbeddingSchedule(every), self, MODEL, 3, "delta/0", self.compute
        )
        self.tables = self.keeper._tables
        monkeypatch.setattr(embedding_sync, "living", lambda peer, stages: self.others)

    async def compute(self, work):
        self.computing = True
        try:
            return work()
        finally:
            self.computing = False

    def distrust(self, name):
        self.distrusted.append(name)

    def serve(self, name, provide, version):
        self.served[name], self.versions[name] = provide, version

    async def fetch(self, name, timeout_s, progress, min_round, stage, max_bytes):
        self.asked.append((name, stage, min_round))
        assert max_bytes == HEAD_BYTES + 4 * 30 * 16
        found = self.there.get((stage, name))
        if isinstance(found, Exception):
            raise found
        if found is None:
            await asyncio.sleep(timeout_s)
            raise SnapshotUnavailable("nobody")
        progress(1, 2)
        await asyncio.sleep(2 * FIND_TIMEOUT_S)  # slow, and coming
        return found

    def at_first(self, applied, average):
        """It serves the first stage, which is at this round."""
        model = build(MODEL, 1, STAGES[0])
        constraint = Constraint.on([name for name, _ in model.named_parameters()], STAGES, BASIS)
        constraint.begin(model)
        self.replica = ConstrainedReplica(
            model, torch.optim.SGD(model.parameters(), 0.1), None, constraint
        )
        self.method = self
        self.average = {name: x.detach().clone() for name, x in model.named_parameters()} | {
            EMBEDDING: average
        }
        self.first = self.keeper.at_first(None, self, lambda: applied)
        return self

    def eval_params(self, replica):
        return self.average

    @property
    def embedding(self):
        return self.replica.read([EMBEDDING], "param")[EMBEDDING]


@pytest.fixture
def world(monkeypatch):
    def made(*given, **terms):
        return KeeperWorld(*given, **terms, monkeypatch=monkeypatch)

    return made


def around(frozen, x):
    return (
        frozen.double() + (x.double() - frozen.double()) @ (BASIS.exact_DK @ BASIS.exact_DK.T)
    ).float()


def run_for(one, seconds):
    async def main():
        task = asyncio.create_task(one.keeper.run())
        await asyncio.sleep(seconds)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())


def test_missing_versions_are_downloaded_together_the_first_stages_first_and_old_ones_dropped(
    world,
):
    one = world(6)  # versions 5 to 8
    one.there = {(0, f"{NAME}/{version % 4}"): offer(version) for version in (5, 6, 7, 8)}
    run_for(one, 2.5 * FIND_TIMEOUT_S)
    assert sorted(one.tables.codec.held) == [5, 6, 7, 8]
    assert all(torch.equal(one.tables.table(version), table(version)) for version in (5, 6, 7, 8))
    assert one.asked == [("table/3", 0, 7), ("table/0", 0, 8), ("table/2", 0, 6), ("table/1", 0, 5)]
    assert all(
        torch.equal(basis.columns_DK, BASIS.columns_DK) for basis in one.tables.codec.held.values()
    )


def test_a_version_that_comes_after_it_was_needed_is_not_kept(world):
    """A node that looks once in a while must not hold one table more meanwhile."""
    one = world(6)
    one.there[0, "table/1"] = offer(5)

    async def main():
        fetching = asyncio.create_task(one.keeper.fetch(5))
        await asyncio.sleep(FIND_TIMEOUT_S)
        one.tables.hold(9, table(9))
        one.rounds.at = 7  # of which 6 is the oldest that is read
        await fetching

    run_virtual(main())
    assert sorted(one.tables.codec.held) == [9]


def test_a_silent_peer_is_not_waited_for_and_another_stage_has_it_too(world):
    one = world(0, others=(1, 0, 2))
    one.there[2, "table/2"] = offer(2)
    run_for(one, 4 * FIND_TIMEOUT_S)
    assert torch.equal(one.tables.table(2), table(2))
    assert one.asked == [("table/2", 0, 2), ("table/2", 2, 2)], "no peer serves stage 1"


def test_a_version_that_no_peer_has_delays_no_other(world):
    one = world(0)

    async def main():
        task = asyncio.create_task(one.keeper.run())
        await asyncio.sleep(1)
        one.rounds.at = 1
        one.there[0, "table/3"] = offer(3)
        await asyncio.sleep(2.2 * FIND_TIMEOUT_S)
        assert one.tables.table(2) is None
        assert torch.equal(one.tables.table(3), table(3))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())


@pytest.mark.parametrize(
    ("wrong", "distrusted"),
    [
        (offer(6), False),  # of the same slot
        (offer(2, {NAME: table(1)[:29]}), True),
        (offer(2, {NAME: torch.full((30, 16), torch.nan)}), True),
        (offer(2, {NAME: table(1).double()}), True),
        (offer(2, {"other": table(1)}), True),
        (offer(2, {}), True),
        (Snapshot(2, bytes(32), 0, (b"no tensors",)), True),
        (Snapshot(2, bytes(32), 0, offer(2).chunks), True),  # another state than its hash says
        (SnapshotUnavailable("gone"), False),
    ],
)
def test_what_is_no_such_table_is_neither_held_nor_fetched_again_and_the_next_stage_is_asked(
    wrong, distrusted, world
):
    one = world(0)
    one.there = {(0, "table/2"): wrong, (1, "table/2"): offer(2)}
    run_for(one, 5 * FIND_TIMEOUT_S)
    assert torch.equal(one.tables.table(2), table(2))
    assert one.distrusted == ["table/2"] * distrusted


def test_tables_are_read_and_written_where_everything_is_computed(world, monkeypatch):
    """A table may have gigabytes: to hash it in the loop would keep the peer silent until it seems
    dead.
    """
    one, done = world(0), []
    for name in ("decode_state", "encode_state", "finite_table"):
        inner = getattr(embedding_sync, name)
        monkeypatch.setattr(
            embedding_sync,
            name,
            lambda *given, inner=inner, name=name: (
                done.append((name, one.computing)) or inner(*given)
            ),
        )
    one.there[0, "table/2"] = offer(2)
    run_for(one, 3 * FIND_TIMEOUT_S)
    run_virtual(one.served["table/2"]())
    assert done == [("decode_state", True), ("finite_table", True), ("encode_state", True)]


def test_what_is_held_is_handed_on_in_as_many_places_as_there_are_versions(world):
    one = world(-1, every=2)

    async def main():
        task = asyncio.create_task(one.keeper.run())
        await asyncio.sleep(1)
        assert set(one.served) == {f"{NAME}/{slot}" for slot in range(3)}
        empty = await one.served["table/1"]()
        assert (empty.round, decode_state(empty)) == (-1, {}), (
            "the first version, which all have and no peer asks for"
        )
        for version in (2, 3, 4, 5):
            one.tables.hold(version, table(version))
            found = await one.served[f"table/{version % 3}"]()
            assert found.round == one.versions[f"table/{version % 3}"]() == version
            assert torch.equal(decode_state(found)[NAME], table(version))
            assert sum(map(len, found.chunks)) <= HEAD_BYTES + 4 * 30 * 16
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())


def test_after_the_first_stage_s_state_is_adopted_its_weights_are_the_version_in_effect(
    world,
):
    one = world().at_first(9, table(9))  # version 10 is in effect
    one.there[0, "table/2"] = offer(10)
    run_virtual(one.keeper.begun(anew=False))
    assert one.tables.codec.spoken == 10
    torch.testing.assert_close(one.embedding, around(table(10), table(9)), rtol=0, atol=2e-6)
    assert one.asked == [("table/2", 0, 10)], "the others have time"


def test_a_peer_without_a_new_version_goes_on_in_the_common_one_until_it_comes(world):
    one = world(others=(1, 0, 0)).at_first(9, table(9))
    run_virtual(one.keeper.begun(anew=False))
    assert one.tables.codec.spoken == 1
    torch.testing.assert_close(one.embedding, around(BASIS.fixed_VD, table(9)), rtol=0, atol=2e-6)
    one.there[0, "table/2"] = offer(10)
    run_for(one, 4 * FIND_TIMEOUT_S)
    assert one.tables.codec.spoken == 10


def test_a_first_stage_that_no_peer_has_is_begun_around_what_other_stages_hold(world):
    one = world(others=(0, 1, 1)).at_first(-1, table(9))
    one.there[1, "table/2"] = offer(10)
    run_virtual(one.keeper.before(9))
    one.replica.write({EMBEDDING: table(5)}, "param")
    torch.testing.assert_close(one.embedding, around(table(10), table(5)), rtol=0, atol=2e-6)


def test_a_founder_that_resumes_alone_makes_the_versions_of_its_average(world, caplog):
    one = world(others=(0, 0, 0)).at_first(9, table(9))
    with caplog.at_level(logging.WARNING, logger="farflock"):
        one.keeper.founded()
    assert "no peer has the frozen embedding of round 9" in caplog.text
    assert one.tables.codec.spoken == 10
    assert torch.equal(one.tables.table(10), table(9))
    assert torch.equal(one.embedding, table(9))
    new = world(others=(0, 0, 0)).at_first(-1, BASIS.fixed_VD)
    new.keeper.founded()
    assert sorted(new.tables.codec.held) == [1]


def test_there_is_a_keeper_only_where_versions_change(world):
    one = world()
    codec = one.tables.codec
    node = one, MODEL, 3, "delta/0", one.compute
    assert type(frozen_embedding(None, codec, *node)) is FrozenEmbedding
    assert type(frozen_embedding(EmbeddingSchedule(1), codec.first, *node)) is FrozenEmbedding
    assert type(frozen_embedding(EmbeddingSchedule(1), codec, *node)) is EmbeddingSync
