"""Versions of the frozen embedding are made, announced and given up; a round updates weights."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.subspace import Subspace
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.contrib.embedding_versions import (
    EmbeddingVersions,
    VersionedContributions,
    finite_table,
)
from farflock.node.pipeline.passes.constraint import EMBEDDING, ConstrainedReplica, Constraint
from farflock.node.run.basis import run_basis
from farflock.node.run.split import even
from farflock.node.run.terms import FIRST_VERSION, VERSION_LEAD, EmbeddingSchedule
from farflock.node.state.cut import Cut, OpenCuts

MODEL = ModelConfig(
    vocab_size=30, dim=16, layers=6, heads=2, kv_heads=1, ffn_dim=24, context=8, tied=False
)
STAGES = even(MODEL, 3)
BASIS = run_basis(4, 16, 5, 30)


# turns


@given(st.integers(1, 20), st.integers(2, 6), st.integers(-1, 200))
def test_each_version_is_made_then_spoken_then_read_on_and_few_are_held_at_once(
    every, overlap, applied
):
    turns = EmbeddingSchedule(every, overlap)
    known = range(FIRST_VERSION, 210)
    made = [version for version in known if turns.made(version) <= applied]
    spoken = [
        version
        for version in known
        if version == FIRST_VERSION or turns.made(version) + VERSION_LEAD <= applied
    ]
    over = [
        version for version in known if turns.made(version + 1) + VERSION_LEAD + overlap <= applied
    ]
    assert turns.newest(applied) == max(made)
    assert turns.in_effect(applied) == max(spoken)
    assert turns.oldest(applied) == max(over, default=FIRST_VERSION - 1) + 1
    assert turns.newest(applied) - turns.oldest(applied) < turns.max_held


@given(st.integers(1, 20), st.integers(0, 200))
def test_versions_are_made_at_a_fixed_number_of_rounds(every, applied):
    turns = EmbeddingSchedule(every)
    assert (turns.newest(applied) != turns.newest(applied - 1)) == ((applied + 1) % every == 0)
    assert turns.made(FIRST_VERSION) == -1


# tables


def tables(every=1, overlap=2):
    return EmbeddingVersions(
        SubspaceVersions(Subspace(BASIS, None, None)), EmbeddingSchedule(every, overlap)
    )


def table(seed):
    return torch.randn(30, 16, generator=torch.Generator().manual_seed(seed))


def test_what_is_lacking_is_what_is_read_or_made_and_not_here_the_one_in_effect_first():
    made = tables()
    assert made.lacking(-1) == []
    assert made.lacking(0) == [2]
    assert made.lacking(6) == [7, 8, 6, 5]
    assert made.hold(7, table(7))
    assert made.lacking(6) == [8, 6, 5]
    assert torch.equal(made.table(7), table(7))
    assert made.table(6) is None


@pytest.mark.parametrize(
    "broken", [torch.full((30, 16), torch.nan), torch.zeros(29, 16), torch.zeros(30, 17)]
)
def test_a_table_that_cannot_be_one_is_not_held(broken, caplog):
    made = tables()
    with caplog.at_level(logging.WARNING, logger="farflock"):
        assert not made.hold(2, broken)
    assert made.table(2) is None
    assert "discarded version 2 of the frozen embedding" in caplog.text


def test_a_peer_that_embeds_nothing_forgets_old_versions_although_it_never_spoke():
    made = tables()
    for version in range(2, 9):
        made.hold(version, table(version))
    made.give_up(7)
    assert sorted(made.codec.held) == [6, 7, 8]
    assert len(made.codec.held) <= made.turns.max_held


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("right", {"table": torch.ones(3, 2)}),
        ("missing", {}),
        ("more", {"table": torch.ones(3, 2), "x": torch.ones(1)}),
        ("shape", {"table": torch.ones(2, 3)}),
        ("type", {"table": torch.ones(3, 2, dtype=torch.float64)}),
        ("infinite", {"table": torch.full((3, 2), torch.inf)}),
    ],
)
def test_of_what_comes_only_a_finite_table_of_the_right_size_is_taken(name, found):
    taken = finite_table(found, "table", 3, 2)
    assert (taken is not None) == (name == "right")


# the first stage


class Books:
    """Notes what is said to it."""

    def __init__(self):
        self.said = []

    def brought(self, number):
        return b"notes %d" % number

    def closing(self, number, noted):
        self.said.append(("closing", number, noted))

    def closed(self, number, noted):
        self.said.append(("closed", number, noted))


class First:
    """A first stage with the average `average`; a round writes it to the replica, or local work."""

    def __init__(self, every=1, *, free=False):
        model = build(MODEL, 1, STAGES[0])
        constraint = Constraint.on([name for name, _ in model.named_parameters()], STAGES, BASIS)
        constraint.begin(model)
        self.replica = ConstrainedReplica(
            model, torch.optim.SGD(model.parameters(), 0.1), None, constraint
        )
        self.tables, self.under, self.average = tables(every), Books(), BASIS.fixed_VD
        replica = None if free else self.replica
        self.cuts = OpenCuts()
        self.contributions = VersionedContributions(
            self.under, self.tables, lambda: self.average, replica, self.cuts
        )

    def round(self, number, average, *, taken=True):
        self.contributions.closing(number, b"x")
        self.average = average
        if taken:
            self.replica.write({EMBEDDING: average}, "param")
        self.contributions.closed(number, b"x")

    @property
    def embedding(self):
        return self.replica.read([EMBEDDING], "param")[EMBEDDING]


def around(frozen, x):
    p = BASIS.exact_DK @ BASIS.exact_DK.T
    return (frozen.double() + (x.double() - frozen.double()) @ p).float()


def test_a_round_makes_a_version_of_the_average_and_the_next_one_projects_around_it():
    first = First()
    before = BASIS.fixed_VD
    for number in range(5):
        first.round(number, table(number))
        assert first.tables.codec.spoken == number + 1
        torch.testing.assert_close(
            first.embedding, around(before, table(number)), rtol=0, atol=2e-6
        )
        before = table(number)
        assert torch.equal(first.tables.table(number + 2), before)
    assert first.contributions.brought(3) == b"notes 3"
    assert first.under.said[:3] == [("closing", 0, b"x"), ("closed", 0, b"x"), ("closing", 1, b"x")]


def test_between_versions_averages_are_projected_around_the_same_table():
    first = First(every=4)
    for number in range(3):
        first.round(number, table(number))
        assert first.tables.codec.spoken == FIRST_VERSION
        torch.testing.assert_close(
            first.embedding, around(BASIS.fixed_VD, table(number)), rtol=0, atol=2e-6
        )
    first.round(3, table(3))
    assert torch.equal(first.tables.table(2), table(3))
    first.round(4, table(4))
    assert first.tables.codec.spoken == 2
    torch.testing.assert_close(first.embedding, around(table(3), table(4)), rtol=0, atol=2e-6)


def test_work_that_a_round_did_not_take_is_brought_to_the_new_version_as_well():
    first = First()
    first.round(0, table(0))
    mine = first.embedding
    first.round(1, table(1), taken=False)
    torch.testing.assert_close(first.embedding, around(table(0), mine), rtol=0, atol=2e-6)


def test_a_peer_without_the_version_in_effect_stays_in_its_own_and_says_so():
    first = First()
    first.round(0, table(0))
    first.tables.codec.give_up(1)
    first.round(5, table(5))  # rounds 1 to 4 went on without it
    assert first.tables.codec.spoken == FIRST_VERSION
    torch.testing.assert_close(first.embedding, around(BASIS.fixed_VD, table(5)), rtol=0, atol=2e-6)
    assert first.tables.lacking(5)[0] == 6
    mine = first.embedding
    cut = Cut({"x": first.replica.block(EMBEDDING, "param", 0, mine.numel())})
    first.cuts.add(cut, stepped=False)
    first.tables.hold(6, table(9))
    first.contributions.follow_late(5)
    ((_, kept),) = cut.read()
    assert torch.equal(kept.view_as(mine), mine), "a cut that is being read stays as it was"
    assert first.tables.codec.spoken == 6
    torch.testing.assert_close(first.embedding, around(table(9), mine), rtol=0, atol=2e-6)


def test_a_free_replica_makes_versions_and_keeps_its_weights():
    first = First(free=True)
    first.contributions.closing(0, b"")
    first.average = table(0)
    before = first.embedding
    first.contributions.closed(0, b"")
    first.contributions.follow_late(1)
    assert torch.equal(first.tables.table(2), table(0))
    assert torch.equal(first.embedding, before)


def test_the_current_embedding_replaces_a_version_that_no_living_peer_has():
    first = First(every=2)
    first.average = table(3)
    assert not first.contributions.begin_anew(-1), "the run's first needs none"
    assert first.contributions.begin_anew(8)
    assert all(torch.equal(first.tables.table(version), table(3)) for version in (4, 5))
    first = First(every=2)
    first.tables.hold(4, table(4))
    first.average = table(3)
    assert not first.contributions.begin_anew(7), "a peer had the version in effect"
    assert torch.equal(first.tables.table(4), table(4))
    assert torch.equal(first.tables.table(5), table(3)), "made with the state that is gone"
    assert first.tables.table(3) is None
