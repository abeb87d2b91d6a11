"""A path that skips or swaps stages trains the model that has those layers in that order, and
nothing else."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from farflock.node.model.llama import PRESETS, build
from farflock.node.pipeline.passes.stage import GradientAccumulator, Stage
from farflock.node.run.split import split
from farflock.swarm.paths.draft import Instance
from farflock.swarm.paths.planner import plan_paths
from farflock.swarm.paths.policy import Microbatch, StageServers
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.paths.skippipe import (
    PathPlan,
    PlannedPaths,
    PlanTerms,
    StageKind,
    Stop,
    require_paths,
)

CONFIG = msgspec.structs.replace(PRESETS["tiny"], layers=6, tied=False, vocab_size=40)
STAGES = 6


def tokens(seed):
    drawn = torch.randint(
        0, CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed)
    )
    return drawn[:, :-1], drawn[:, 1:]


def stages():
    return [Stage(build(CONFIG, 7, span).double()) for span in split(CONFIG, [1] * STAGES)]


def kinds():
    """The kinds of the stages, read from the stages themselves."""
    found = []
    for stage in stages():
        takes, gives = (
            "tokens" if stage.is_first else "hidden",
            "logits" if stage.is_last else "hidden",
        )
        found.append(
            StageKind(
                takes, gives, tuple(tuple(weight.shape) for weight in stage.model.parameters())
            )
        )
    return tuple(found)


def walk(order, microbatch, servers, sums):
    """Go forward along these stages and back, as a trainer does."""
    x, targets = microbatch
    inputs = []
    for stage in order:
        inputs.append(x)
        if stage != order[-1]:
            x = servers[stage].forward(x)
    gradient = targets
    for stage, inside in zip(reversed(order), reversed(inputs), strict=True):
        done = servers[stage].backward(inside, gradient)
        sums[stage].add(done.staged)
        gradient = done.input_gradient


def twin(orders, microbatches):
    """Call the layers of one model by hand in the order of each path; return the gradients of the
    summed loss, None where no path went."""
    model = build(CONFIG, 7).double()
    for order, (x, targets) in zip(orders, microbatches, strict=True):
        hidden = model.model.embed_tokens(x)
        for stage in order:
            hidden = model.model.layers[str(stage)](
                hidden, model.cos[: x.shape[1]], model.sin[: x.shape[1]]
            )
        logits = model.lm_head(model.model.norm(hidden))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def require_equal(sums, expected):
    seen = set()
    for stage, accumulator in enumerate(sums):
        for name in stages()[stage].model.state_dict():
            if expected[name] is None:
                assert name not in accumulator.sums
            else:
                torch.testing.assert_close(
                    accumulator.sums[name], expected[name], rtol=1e-12, atol=1e-14
                )
            seen.add(name)
    assert seen == expected.keys()


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4, 5), (0, 1, 3, 5), (0, 2, 1, 4, 5), (0, 5), (0, 1, 2, 4, 3, 5)],
    ids=str,
)
def test_a_paths_gradient_is_that_of_the_model_of_its_layers_in_its_order(order):
    require_paths(
        PathPlan(((tuple(Stop(stage, "a") for stage in order),),), 1),
        [{"a"}] * STAGES,
        PlanTerms(kinds(), len(order)),
    )
    sums = [GradientAccumulator() for _ in range(STAGES)]
    walk(order, tokens(0), stages(), sums)
    require_equal(sums, twin([order], [tokens(0)]))
    for stage, accumulator in enumerate(sums):
        assert accumulator.tokens == (16 if stage in order else 0)
        assert bool(accumulator.sums) == (stage in order)


def test_the_order_of_a_swap_matters_so_that_the_twin_can_tell():
    straight, swapped = (twin([order], [tokens(0)]) for order in ((0, 1, 2, 5), (0, 2, 1, 5)))
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.allclose(straight[name], swapped[name], rtol=1e-6)


def test_a_planned_step_gives_each_stage_the_sum_over_those_that_visited_it():
    """Paths, answers and stages are those of the planner, the policy and the product. Divided by
    N_s, the sum is the mean over the visitors."""
    serving = tuple(tuple(f"s{stage}-{number}" for number in range(2)) for stage in range(STAGES))
    peers = [peer for each in serving for peer in each]
    instance = Instance(
        serving,
        PlanTerms(kinds(), 4),
        dict.fromkeys(peers, 1.0),
        {
            here: {there: 0.1 + (i * 7 + j * 5) % 11 for j, there in enumerate(peers)}
            for i, here in enumerate(peers)
        },
        memory=2,
        turns=4,
        per_step=4,
        head_is_first=False,
    )
    policy = PlannedPaths(plan_paths(instance, seed=1, work=30), STAGES)
    known = StageServers(1, tuple(tuple(Announced(peer, 1) for peer in each) for each in serving))
    servers, sums, orders, batches = (
        stages(),
        [GradientAccumulator() for _ in range(STAGES)],
        [],
        [],
    )
    for lane in range(2):
        for index in range(4):
            microbatch = Microbatch(0, index, lane)
            order = policy.stage_order(microbatch)
            assert all(
                policy.next_hop(microbatch, stage, known, 0.0) in serving[stage] for stage in order
            )
            orders.append(order)
            batches.append(tokens(10 * lane + index))
            walk(order, batches[-1], servers, sums)
    require_equal(sums, twin(orders, batches))
    assert [accumulator.tokens for accumulator in sums] == [128, 64, 64, 64, 64, 128]
