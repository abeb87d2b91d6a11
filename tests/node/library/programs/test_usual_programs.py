"""Usual programs as they are: two peers on data of their own end a round with equal weights.

`CASES` are the programs that were once tried by hand with the library. It names the test of each;
`make compat` runs those that need other packages. `REPORTS` does so for programs with other loops.
"""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import train_together

torch.set_num_threads(1)
TESTS = Path(__file__).parents[3]
LIBRARY, HERE = "node/library", "node/library/programs"
USUAL = f"{HERE}/test_usual_programs.py::test_both_peers_end_equal"
EXAMPLES = "net/test_more_examples.py::test_two_programs_with_other_packages_end_with_the_same"
LOOPS = "node/use/test_other_loops.py"
OPTIMIZER = f"{LIBRARY}/test_swarm_optimizer.py"
GRADIENTS = f"{HERE}/test_step_gradients.py"
CHECK = f"{LIBRARY}/test_model_check.py"
SHARED = f"{LIBRARY}/test_shared_optimizer.py"
CASES = {
    "an MLP in a plain loop": f"{USUAL}[mlp",
    "Trainer: accumulation, clipping, a schedule, checkpoints": f"{LOOPS}::test_a_trainer",
    "Lightning, automatic": f"{EXAMPLES}_weights[with_lightning",
    "Lightning, manual": f"{LOOPS}::test_lightning_s_manual",
    "accelerate: bf16, accumulation, states saved": f"{LOOPS}::test_accelerate",
    "autocast to bf16": f"{USUAL}[autocast",
    "GradScaler, unscale_, clipping": f"{GRADIENTS}::test_under_a_scaler",
    "GradScaler that skips a step of one peer": f"{GRADIENTS}::test_skipped_steps_count",
    "fused AdamW": f"{USUAL}[fused",
    "torch.compile inside of the loop": f"{USUAL}[compiled-inside",
    "the compiled module is passed": f"{HERE}/test_wrapped_models.py::test_what_is_evaluated",
    "compiled on one peer only": f"{HERE}/test_wrapped_models.py::test_compiled_and_plain",
    "tied weights": f"{USUAL}[tied",
    "BatchNorm": f"{HERE}/test_averaged_buffers.py::test_after_a_round",
    "equal frozen weights": f"{USUAL}[frozen",
    "groups with rates of their own": f"{USUAL}[groups",
    "OneCycleLR": f"{OPTIMIZER}::test_torch_s_schedulers",
    "parameters that nobody uses": f"{LIBRARY}/test_unusual_tensors.py::test_a_layer_that_nobody",
    "bf16 parameters": f"{USUAL}[bf16",
    "float64 parameters": f"{USUAL}[float64",
    "a frozen int8 parameter": f"{USUAL}[int8",
    "hooks": f"{OPTIMIZER}::test_hooks_and_names",
    "Adafactor as the inner optimizer": f"{USUAL}[adafactor",
    "a sparse embedding under diloco": f"{CHECK}::test_it_is_refused_by_name",
    "a sparse embedding under ddp": f"{CHECK}::test_it_is_refused_by_name",
    "gradients after a step": f"{GRADIENTS}::test_gradients_stay_after_a_step",
    "frozen weights that differ": f"{HERE}/test_frozen_base.py::test_without_a_word",
    "copies of the optimizer": f"{CHECK}::test_an_optimizer_is_not_copied",
    "pickles of the optimizer": f"{CHECK}::test_an_optimizer_is_not_copied",
    "a state dict, loaded among others": f"{OPTIMIZER}::test_among_others_a_state_dict",
    "LoRA with peft": f"{EXAMPLES}_weights[with_peft",
    "FSDP2": f"{SHARED}::test_two_processes_join_the_run_of_one",
    "DDP, several processes": f"{SHARED}::test_two_processes_train_as_one_does",
}

# What public reports of other trainers led to, by their numbers: each works, or is told in a
# sentence (docs/how-to/use-your-own-loop.md).
ODD = f"{LIBRARY}/test_unusual_tensors.py"
REPORTS = {
    "6, an old checkpoint is loaded": f"{LIBRARY}/test_jump_watch.py::test_an_old_checkpoint",
    "7, complex parameters": f"{ODD}::test_peers_agree_on_both_parts",
    "7, float64 parameters": f"{ODD}::test_a_double_parameter_stays_one",
    "8, the same batches": f"{LIBRARY}/test_same_data.py::test_each_member_is_told_once",
    "9, one NaN batch": f"{LIBRARY}/test_one_nan_batch.py::test_the_others_rounds_close",
    "10, a member that sleeps": "swarm/protocol/test_latecomers.py::test_the_others_keep_their",
    "11, a late joiner's rate": f"{LIBRARY}/test_scheduled.py::test_a_late_joiner_s_rate",
    "12, shorter than a period": f"{LIBRARY}/test_last_round.py::test_a_program_shorter_than",
    "15, forked workers": f"{LIBRARY}/test_forked.py::test_a_child_forked_in_the_block",
    "16, transposed parameters": f"{ODD}::test_parameters_in_another_order",
    "17, parameters replaced": f"{LIBRARY}/test_parameter_watch.py::test_a_changed_parameter",
    "18, empty and lazy tensors": f"{CHECK}::test_it_is_refused_by_name",
    "19, a default device": f"{ODD}::test_programs_with_a_default_device",
    "20, no gradient": f"{ODD}::test_a_layer_that_nobody_uses",
    "26, BatchNorm": f"{HERE}/test_averaged_buffers.py::test_after_a_round_all_peers",
}


class Tied(nn.Module):
    """Its embedding is its head, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding((x[:, :1] * 3).long().remainder(16))).mean(2)


class Quantized(nn.Module):
    """A frozen weight in whole numbers under a trained scale."""

    def __init__(self):
        super().__init__()
        values = torch.arange(8, dtype=torch.int8)[None]
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).T


def mlp(dtype=torch.float32):
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def compiled_inside(model, x):
    return torch.compile(model, backend="eager")(x)


def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def plain(model, x):
    return model(x.to(next(model.parameters()).dtype))


def groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": rest}], lr=1e-2)


def adafactor(parameters):
    return torch.optim.Adafactor(list(parameters), lr=1e-2)


adamw = partial(torch.optim.AdamW, lr=1e-2)
fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def trained(parameters):
    return [entry for entry in parameters if entry.requires_grad]


@pytest.mark.filterwarnings("ignore:parameter 0.weight is float64")
@pytest.mark.parametrize(
    ("make", "call", "inner"),
    [
        pytest.param(mlp, plain, adamw, id="mlp"),
        pytest.param(mlp, autocast, adamw, id="autocast"),
        pytest.param(mlp, plain, fused, id="fused"),
        pytest.param(mlp, compiled_inside, adamw, id="compiled-inside"),
        pytest.param(Tied, lambda model, x: model(x), adamw, id="tied"),
        pytest.param(frozen, plain, adamw, id="frozen"),
        pytest.param(mlp, plain, groups, id="groups"),
        pytest.param(partial(mlp, torch.bfloat16), plain, adamw, id="bf16"),
        pytest.param(partial(mlp, torch.float64), plain, adamw, id="float64"),
        pytest.param(Quantized, lambda model, x: model(x), adamw, id="int8"),
        pytest.param(mlp, plain, adafactor, id="adafactor"),
    ],
)
def test_both_peers_end_equal(make, call, inner):
    def model_of(rank):
        torch.manual_seed(0)  # frozen weights have to be equal
        return make()

    async def work(member):
        before = weights(member.model)
        for step in range(6):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(9 * step + member.rank))
            await member.step(partial(loss_of, call, x))
        return before, weights(member.model), member.rounds[-1]

    def loss_of(call, x, model):
        return (call(model, x).float() - x.sum(1, keepdim=True)).square().mean()

    (before, ours, last), (_, theirs, _) = train_together(
        2, "diloco", model_of, work, lambda all_: inner(trained(all_)), period=3, codec="int8"
    )
    assert last["status"] == "ok"
    assert last["peers"] == 2
    assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, before, ours))


def weights(model):
    return [entry.detach().clone() for entry in model.parameters()]


def test_there_are_thirty_three_and_each_has_its_test():
    assert len(CASES) == 33
    for case, test in {**CASES, **REPORTS}.items():
        file, _, name = test.partition("::")
        name, _, id_ = name.partition("[")
        tree = ast.parse((TESTS / file).read_text())
        found = [
            each.name
            for each in ast.walk(tree)
            if isinstance(each, ast.FunctionDef) and each.name.startswith(name)
        ]
        assert len(found) == 1, (case, found)
        words = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
        assert not id_ or id_ in words, case
