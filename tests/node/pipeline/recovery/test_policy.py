"""The ladder of sources: each rung where those above it fail, and the reasons that it gives."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.pipeline.recovery.policy import Situation, plan, source
from farflock.node.pipeline.recovery.rebuild import Unrecoverable

FULL = Situation(200, (2,) * 6, (1, 1, 2, 1, 1, 1), (None,) * 6, cut=150)


def after(**changed):
    return dataclasses.replace(FULL, **changed)


def lost(*stages, **changed):
    living = tuple(0 if stage in stages else 1 for stage in range(6))
    return after(living=living, **changed)


def fresh(stage, taken):
    return tuple(taken if here == stage else None for here in range(6))


def test_a_peer_that_joins_a_live_stage_asks_its_peers_even_if_a_snapshot_is_newer():
    chosen = source(after(snapshots=(199,) * 6), 2)
    assert (chosen.kind, chosen.stages, chosen.reason) == ("peer", (2,), "2 peers hold it")
    assert plan(FULL) == {}


def test_a_lost_stage_takes_a_snapshot_that_is_young_enough():
    chosen = plan(lost(2, snapshots=fresh(2, 101)))
    assert chosen.keys() == {2}
    assert (chosen[2].kind, chosen[2].stages, chosen[2].round) == ("snapshot", (2,), 101)
    assert (
        chosen[2].reason == "no peer of stage 2 is left; its snapshot of round 101 is 99 rounds old"
    )


def test_an_older_one_gives_way_to_the_neighbours_mean():
    chosen = plan(lost(2, snapshots=fresh(2, 100)))[2]
    assert (chosen.kind, chosen.stages, chosen.round) == ("mean", (1, 3), 200)
    assert chosen.reason == (
        "no peer of stage 2 is left; its freshest snapshot is 100 rounds old, the limit is 100; "
        "mean of stages 1 and 3"
    )
    assert plan(lost(2, snapshots=fresh(2, 100), max_age_rounds=101))[2].kind == "snapshot"


def test_stages_that_are_no_neighbours_are_recovered_side_by_side():
    chosen = plan(lost(1, 3, snapshots=fresh(1, 190)))
    assert {stage: (entry.kind, entry.stages) for stage, entry in chosen.items()} == {
        1: ("snapshot", (1,)),
        3: ("mean", (2, 4)),
    }


def test_two_lost_neighbours_send_everybody_back():
    chosen = plan(lost(2, 3))
    assert chosen.keys() == set(range(6))
    assert {(entry.kind, entry.round) for entry in chosen.values()} == {("cut", 150)}
    assert (
        "neighbour mean next to a lost stage: stage 3 is lost too; all stages go back to round 150"
        in chosen[0].reason
    )


def test_unequal_neighbours_send_everybody_back():
    chosen = plan(lost(2, layers=(2, 2, 2, 3, 2, 2)))
    assert chosen[5].kind == "cut"
    assert (
        "neighbour mean of unequal stages: stage 2 has 2 layers, stage 3 has 3" in chosen[5].reason
    )


@pytest.mark.parametrize(("stage", "beside", "part"), [(0, 1, "embedding"), (5, 4, "head")])
def test_an_end_is_copied_from_its_neighbour_if_its_own_part_is_held(stage, beside, part):
    held = (stage == 0, stage == 5)
    chosen = plan(lost(stage, ends=held))[stage]
    assert (chosen.kind, chosen.stages) == ("copy", (beside,))
    assert chosen.reason.endswith(f"copy of stage {beside}, and the exact copy of its {part}")
    without = plan(lost(stage, ends=held[::-1]))[stage]
    assert without.kind == "cut"
    assert (
        f"neighbour mean of an end stage: no peer has an exact copy of its {part}" in without.reason
    )
    assert plan(lost(stage, beside, ends=held))[stage].kind == "cut"
    odd = tuple(1 if here == stage else 2 for here in range(6))
    assert plan(lost(stage, ends=held, layers=odd))[stage].kind == "cut"


@pytest.mark.parametrize(
    ("stage", "kind", "read"), [(1, "copy", (2,)), (2, "mean", (1, 3)), (4, "copy", (3,))]
)
def test_a_run_that_swaps_copies_its_first_and_last_block_stage_from_their_partners(
    stage, kind, read
):
    chosen = plan(lost(stage, swapping=True))[stage]
    assert (chosen.kind, chosen.stages) == (kind, read)
    assert plan(lost(stage))[stage].kind == "mean"


def test_a_swapped_stage_needs_its_partner_alone():
    assert plan(lost(1, layers=(5, 2, 2, 2, 2, 5), swapping=True))[1].kind == "copy"
    assert plan(lost(1, layers=(5, 2, 2, 2, 2, 5)))[1].kind == "cut"
    assert plan(lost(1, 2, swapping=True))[1].kind == "cut"


@pytest.mark.parametrize("living", [(0,), (0, 0)])
def test_a_pipeline_of_which_nothing_is_left_goes_back(living):
    count = len(living)
    now = Situation(9, (2,) * count, living, (None,) * count, (True, True), cut=4)
    assert {entry.kind for entry in plan(now).values()} == {"cut"}


def test_what_cannot_be_recovered_at_all_says_everything_that_was_tried():
    with pytest.raises(Unrecoverable) as caught:
        plan(lost(0, cut=None))
    assert str(caught.value) == (
        "stage 0 cannot be recovered: no peer of stage 0 is left; there is no snapshot of it; "
        "neighbour mean of an end stage: no peer has an exact copy of its embedding; there is no "
        "round of which every stage has a checkpoint; keep checkpoints of every stage at a common "
        "round, and start again from what is left"
    )


def test_a_description_of_unequally_many_stages_is_refused():
    with pytest.raises(ValueError, match=r"have \(6, 6, 5\) entries"):
        after(snapshots=(None,) * 5)
    with pytest.raises(ValueError, match="give each one entry per stage"):
        Situation(0, (), (), ())


situations = st.builds(
    lambda rows, **more: Situation(100, *(zip(*rows, strict=True)), **more),
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 1), st.none() | st.integers(0, 100)),
        min_size=1,
        max_size=7,
    ),
    ends=st.tuples(st.booleans(), st.booleans()),
    cut=st.integers(0, 100),
    max_age_rounds=st.integers(0, 101),
)


@given(now=situations)
def test_a_plan_fills_every_lost_stage_from_what_is_there_and_leaves_the_others_alone(now):
    chosen = plan(now)
    gone = {stage for stage, living in enumerate(now.living) if not living}
    if any(entry.kind == "cut" for entry in chosen.values()):
        assert chosen.keys() == set(range(len(now.layers)))
        assert len(set(chosen.values())) == 1
        return
    assert chosen.keys() == gone
    for stage, entry in chosen.items():
        if entry.kind == "snapshot":
            assert entry.round == now.snapshots[stage]
            assert now.round - entry.round < now.max_age_rounds
        else:
            assert all(
                now.living[read] and now.layers[read] == now.layers[stage] for read in entry.stages
            )
