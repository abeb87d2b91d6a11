"""Stages for unequal machines: every byte and rate of the model counted by hand,
and plans against all there are."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.experiments.placement.asymmetric import (
    MachineProfile,
    ModelCosts,
    assigned,
    split,
    stage_shares,
)

GB = 1e9
PLAIN = ModelCosts(
    layers=12, layer_bytes=1 * GB, embedding_bytes=0, head_bytes=0, head_layers=0, edge_bytes=0
)
FAST = 1e12


def machine(rate=1.0, memory=100 * GB, up=FAST, down=FAST):
    return MachineProfile(rate, memory, up, down)


def by_hand(model, layers, machines, teams):
    """Return the samples per second of the slowest stage, computed independently from the formula;
    None if a machine lacks memory."""
    speeds = []
    for stage, (count, members) in enumerate(zip(layers, teams, strict=True)):
        first, last = stage == 0, stage == len(layers) - 1
        need = count * model.layer_bytes + first * model.embedding_bytes + last * model.head_bytes
        need += model.microbatch * count * model.inner_bytes
        need += 0 if first else model.microbatch * model.in_flight * model.edge_bytes
        if any(machines[member].memory_bytes < need for member in members):
            return None
        speed = sum(machines[member].rate for member in members) / (
            count + last * model.head_layers
        )
        crossing = ((not first) + (not last)) * model.edge_bytes
        if crossing:
            speed = min(
                speed,
                sum(min(machines[member].up, machines[member].down) for member in members)
                / crossing,
            )
        speeds.append(speed)
    return min(speeds)


def exhaustive(model, machines, stages, replicas):
    """The best of all boundaries and all ways to give machines stages or nothing;
    None if nothing can be served."""
    best = None
    for cuts in itertools.combinations(range(1, model.layers), stages - 1):
        layers = [end - begin for begin, end in itertools.pairwise((0, *cuts, model.layers))]
        for places in itertools.product(range(stages + 1), repeat=len(machines)):
            teams = [
                [member for member, place in enumerate(places) if place == stage]
                for stage in range(stages)
            ]
            if min(map(len, teams)) >= replicas:
                speed = by_hand(model, layers, machines, teams)
                best = max(filter(None, (best, speed)), default=None)
    return best


def drawn(seed):
    """A model, a few machines and a number of stages."""
    chance = random.Random(seed)
    model = ModelCosts(
        layers=chance.randint(3, 6),
        layer_bytes=GB,
        embedding_bytes=chance.choice([0, GB]),
        head_bytes=chance.choice([0, GB]),
        head_layers=chance.choice([0, 0.7, 1.5]),
        edge_bytes=chance.choice([0, 1e6]),
        inner_bytes=chance.choice([0, 1e8]),
        in_flight=chance.choice([1, 3]),
    )
    machines = [
        MachineProfile(
            chance.uniform(1, 4),
            chance.choice([2.5, 3.5, 5, 9]) * GB,
            chance.uniform(5e5, 5e6),
            chance.uniform(5e5, 5e6),
        )
        for _ in range(chance.randint(3, 5))
    ]
    return model, machines, chance.randint(1, 3)


def test_equal_machines_get_equal_stages():
    found = split(PLAIN, [machine() for _ in range(9)], stages=3)
    assert found.layers == (4, 4, 4)
    assert [len(members) for members in found.machines] == [3, 3, 3]
    assert found.samples_per_s == 3 / 4
    assert found.spare == ()


def test_layers_that_do_not_divide_differ_by_one():
    assert sorted(split(PLAIN, [machine() for _ in range(10)], stages=5, replicas=2).layers) == [
        2,
        2,
        2,
        3,
        3,
    ]


def test_a_heavy_head_takes_layers_from_the_last_stage():
    model = ModelCosts(12, GB, 0, 0, head_layers=3, edge_bytes=0)
    found = split(model, [machine() for _ in range(3)], stages=3, replicas=1)
    assert found.layers == (5, 5, 2)


def test_weak_machines_serve_a_light_stage_and_strong_ones_a_heavy_one():
    machines = [machine(rate=3.0), machine(rate=1.0)]
    found = split(PLAIN, machines, stages=2, replicas=1)
    share = dict(zip(found.machines, found.layers, strict=True))
    assert share == {(0,): 9, (1,): 3}
    assert found.samples_per_s == pytest.approx(1 / 3)


def test_memory_decides_where_rates_are_equal():
    machines = [machine(memory=9 * GB), machine(memory=3.5 * GB)]
    found = split(PLAIN, machines, stages=2, replicas=1)
    assert dict(zip(found.machines, found.layers, strict=True)) == {(0,): 9, (1,): 3}


def test_a_slow_link_is_a_bottleneck_and_the_ends_carry_half():
    model = ModelCosts(6, GB, 0, 0, 0, edge_bytes=1e6)
    first, inner, last = stage_shares(model, (2, 2, 2))
    slow = [machine(rate=100.0, up=1e6, down=3e6)]
    assert first.samples_per_s(slow) == last.samples_per_s(slow) == 1.0
    assert inner.samples_per_s(slow) == 0.5
    (only,) = stage_shares(model, (6,))
    assert only.samples_per_s(slow) == pytest.approx(100 / 6)


def test_memory_is_counted_to_the_last_part():
    model = ModelCosts(6, 100, 30, 50, 0, edge_bytes=7, inner_bytes=2, microbatch=4, in_flight=5)
    first, inner, last = stage_shares(model, (1, 2, 3))
    assert first.memory_bytes == 100 + 30 + 4 * 2
    assert inner.memory_bytes == 200 + 4 * (5 * 7 + 2 * 2)
    assert last.memory_bytes == 300 + 50 + 4 * (5 * 7 + 3 * 2)


def test_a_node_that_fits_nowhere_is_spare():
    machines = [machine(), machine(memory=GB / 2), machine()]
    assert split(PLAIN, machines, stages=2, replicas=1).spare == (1,)


def test_the_only_large_machine_is_kept_for_the_stage_that_no_other_can_hold():
    """By speed alone the first, fastest machine would go to the slowest stage of all,
    which small ones can serve too."""
    model = ModelCosts(4, GB, 0, head_bytes=5 * GB, head_layers=0, edge_bytes=0)
    machines = [
        machine(rate=4, memory=8 * GB),
        machine(rate=3, memory=2.5 * GB),
        machine(rate=2, memory=2.5 * GB),
    ]
    found = assigned(stage_shares(model, (2, 2)), machines, replicas=1)
    assert found.machines == ((1, 2), (0,))


def test_without_a_number_the_fewest_stages_that_are_fastest_are_taken():
    assert split(PLAIN, [machine() for _ in range(6)]).layers == (12,)
    small = [machine(memory=4.5 * GB) for _ in range(9)]
    assert split(PLAIN, small).layers == (4, 4, 4)


@pytest.mark.parametrize("seed", range(40))
def test_it_comes_close_to_the_best_of_all_splits(seed):
    model, machines, stages = drawn(seed)
    best = exhaustive(model, machines, stages, replicas=1)
    if best is None:
        with pytest.raises(ValueError, match="more stages"):
            split(model, machines, stages, replicas=1)
    else:
        found = split(model, machines, stages, replicas=1)
        assert by_hand(model, found.layers, machines, found.machines) == pytest.approx(
            found.samples_per_s
        )
        assert 0.9 * best <= found.samples_per_s <= best * (1 + 1e-9)


rates = st.floats(0.1, 10)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(rates, st.floats(4, 20)), min_size=6, max_size=12), st.integers(1, 3))
def test_layers_add_up_and_no_machine_is_over_memory_or_in_two_stages(measured, stages):
    machines = [machine(rate, memory * GB) for rate, memory in measured]
    try:
        found = split(PLAIN, machines, stages, replicas=2)
    except ValueError:
        return
    assert sum(found.layers) == PLAIN.layers
    served = [member for members in found.machines for member in members]
    assert sorted([*served, *found.spare]) == list(range(len(machines)))
    assert all(len(members) >= 2 for members in found.machines)
    assert by_hand(PLAIN, found.layers, machines, found.machines) == pytest.approx(
        found.samples_per_s
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(rates, min_size=3, max_size=9), st.integers(0, 2))
def test_more_machines_for_a_stage_never_make_it_slower(measured, doubled):
    teams = [measured[stage::3] for stage in range(3)]
    more = [team * (1 + (stage == doubled)) for stage, team in enumerate(teams)]

    def slowest(teams):
        stages = zip(stage_shares(PLAIN, (4, 4, 4)), teams, strict=True)
        return min(part.samples_per_s([machine(rate) for rate in team]) for part, team in stages)

    assert slowest(more) >= slowest(teams)


def test_a_stage_that_fits_no_machine_is_refused_with_its_need_and_the_remedy():
    machines = [machine(memory=3 * GB) for _ in range(4)]
    with pytest.raises(
        ValueError,
        match=r"stage \d of 2, 6 layers .* needs 5722 MiB: 0 of 4 machines .* take more stages",
    ):
        split(PLAIN, machines, stages=2, replicas=1)


def test_too_few_large_machines_for_two_large_stages_are_refused():
    machines = [machine(memory=7 * GB), *(machine(memory=2 * GB) for _ in range(3))]
    with pytest.raises(
        ValueError, match="1 of 4 machines have that much, and the larger stages need 1 of them"
    ):
        split(PLAIN, machines, stages=2, replicas=1)


@pytest.mark.parametrize(
    ("machines", "stages", "replicas", "reason"),
    [
        (2, 3, 1, "cannot form 3 stages; give 1 to 2 stages"),
        (2, None, 3, "fewer replicas"),
        (9, 0, 3, "cannot form 0 stages"),
        (40, 13, 1, "12 layers cannot form 13 stages"),
        (9, 3, 0, "0 replicas"),
    ],
)
def test_what_cannot_be_split_is_refused(machines, stages, replicas, reason):
    with pytest.raises(ValueError, match=reason):
        split(PLAIN, [machine() for _ in range(machines)], stages, replicas)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match="machine's rate"):
        machine(rate=wrong)
    with pytest.raises(ValueError, match="machine's down"):
        machine(down=wrong)


def test_an_impossible_model_is_refused_by_name():
    with pytest.raises(ValueError, match="edge_bytes is nan"):
        ModelCosts(2, GB, 0, 0, 0, edge_bytes=float("nan"))
    with pytest.raises(ValueError, match="0 layers"):
        ModelCosts(0, GB, 0, 0, 0, 0)
