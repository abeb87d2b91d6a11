"""Experts equal a slow loop over tokens; their balance moves the router and no loss's value."""

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from worlds.folders.model_folder import EXPERTS, write_model

from farflock.node.model.experts import Experts, balance_of
from farflock.node.model.export import export
from farflock.node.model.hf_config import config_in
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.loss import IGNORED
from farflock.node.pipeline.passes.stage import Stage, backward_through
from farflock.node.run.memory import stage_parameters
from farflock.node.run.split import even
from farflock.node.state.weights_file import WeightsFolder, initial
from farflock.node.tokens.tokenizer import ByteTokenizer

SPLIT = msgspec.structs.replace(EXPERTS, tied=False)
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"


def linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, bias=False)


def tokens(shape=(2, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 256, shape, generator=generator) for _ in range(2))
    return x, y


def gradients(loss, model):
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def balances(model, x):
    """The balance of each layer, read from its experts."""
    found = []
    hooks = [
        block.register_forward_hook(lambda _, __, y: found.append(y[1])) for block in model.blocks()
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def one_by_one(experts, x_BLD):
    """The outputs of experts, for one token after another."""
    y_BLD = torch.zeros_like(x_BLD)
    for row, line in enumerate(x_BLD):
        for at, x_D in enumerate(line):
            odds = torch.exp(experts.gate.weight @ x_D)
            odds /= odds.sum()
            best = sorted(range(len(odds)), key=lambda e: -float(odds[e]))[: experts.used]
            total = sum(odds[e] for e in best)
            for e in best:
                one = experts.experts[e]
                hidden = F.silu(one.w1.weight @ x_D) * (one.w3.weight @ x_D)
                y_BLD[row, at] += odds[e] / total * (one.w2.weight @ hidden)
    return y_BLD


@pytest.mark.parametrize("used", [1, 2, 3, 5])
def test_experts_equal_a_loop_over_tokens(used):
    torch.manual_seed(1)
    experts = Experts(6, 10, 5, used, linear)
    x_BLD = 3 * torch.randn(2, 7, 6)
    torch.testing.assert_close(experts(x_BLD)[0], one_by_one(experts, x_BLD))


def test_an_expert_without_tokens_has_gradients_of_zero():
    experts = Experts(4, 6, 3, 1, linear)
    with torch.no_grad():
        experts.gate.weight.copy_(torch.tensor([[1.0], [-1.0], [-2.0]]).expand(3, 4))
    y_BLD, _ = experts(torch.rand(1, 5, 4))
    y_BLD.sum().backward()
    assert experts.experts[0].w1.weight.grad.abs().max() > 0
    for idle in experts.experts[1:]:
        assert all(not weight.grad.any() for weight in idle.parameters())


def odds(probabilities, chosen):
    return balance_of(torch.tensor(probabilities), torch.tensor(chosen))


def test_the_balance_is_one_when_even_and_the_number_of_experts_when_one_has_all():
    assert odds([[0.25] * 4] * 4, [[0], [1], [2], [3]]) == pytest.approx(1.0)
    assert odds([[1.0, 0.0, 0.0, 0.0]] * 4, [[0]] * 4) == pytest.approx(4.0)


@given(st.integers(2, 6), st.integers(1, 20), st.data())
def test_the_balance_is_the_sum_of_shares_times_odds(count, length, data):
    used = data.draw(st.integers(1, count))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    odds_TE = torch.rand(length, count, generator=generator).softmax(-1)
    _, chosen_TC = odds_TE.topk(used)
    shares = [int((chosen_TC == e).sum()) / (length * used) for e in range(count)]
    means = odds_TE.mean(0).tolist()
    wanted = count * sum(f * p for f, p in zip(shares, means, strict=True))
    assert float(balance_of(odds_TE, chosen_TC)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("again", [False, True], ids=["", "layers-computed-again"])
def test_a_loss_has_the_gradients_of_the_balance_and_not_its_value(reduction, again):
    model, (x, y) = build(EXPERTS, 3), tokens()
    unbalanced = build(msgspec.structs.replace(EXPERTS, balance=0.0), 3)
    model.checkpointing = again
    loss, plain = model(x, y, reduction), unbalanced(x, y, reduction)
    assert torch.equal(loss, plain)
    with torch.no_grad():
        assert torch.equal(model(x, y, reduction), plain)
    times = 1 if reduction == "mean" else x.numel()
    extra = 0.01 * times * torch.stack(balances(model, x)).mean()
    wanted, alone = gradients(plain, unbalanced), gradients(loss, model)
    added = torch.autograd.grad(extra, list(model.parameters()), allow_unused=True)
    for (name, _), more in zip(model.named_parameters(), added, strict=True):
        both = wanted[name] if more is None else wanted[name] + more
        torch.testing.assert_close(alone[name], both, rtol=1e-4, atol=1e-7 * times)
    assert not torch.allclose(alone[ROUTER], wanted[ROUTER], rtol=1e-2)


def test_stages_together_have_the_gradients_of_the_whole_model():
    whole, (x, y) = build(SPLIT, 3), tokens()
    wanted = gradients(whole(x, y, "sum"), whole)
    stages = [Stage(build(SPLIT, 3, span)) for span in even(SPLIT, 2)]
    together, loss = backward_through(stages, x, y)
    assert loss == pytest.approx(float(whole(x, y, "sum").detach()), rel=1e-6)
    last = stages[1].backward(stages[0].forward(x), y)
    first = stages[0].backward(x, last.input_gradient)
    for staged in (together, (first.staged, last.staged)):
        found = {name: g for part in staged for name, g in part.gradients.items()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_logits_alone_have_no_balance_in_their_gradients():
    x, _ = tokens()
    model = build(EXPERTS, 3)
    unbalanced = build(msgspec.structs.replace(EXPERTS, balance=0.0), 3)
    found, wanted = (gradients(m(x).square().mean(), m)[ROUTER] for m in (model, unbalanced))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("config", [EXPERTS, SPLIT], ids=["tied", "untied"])
def test_weights_are_counted_without_being_allocated(config):
    assert config.parameters() == sum(x.numel() for x in build(config, 0).parameters())
    spans = even(SPLIT, 2)
    counted = [stage_parameters(SPLIT, span) for span in spans]
    assert counted == [sum(x.numel() for x in build(SPLIT, 0, s).parameters()) for s in spans]


def test_the_same_seed_gives_the_same_gradients_bit_by_bit():
    (x, y), found = tokens(), []
    for _ in range(2):
        model = build(EXPERTS, 3)
        found.append(gradients(model(x, y), model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_layer_that_is_computed_again_chooses_the_same_experts():
    torch.manual_seed(1)
    experts, x_BLD = Experts(6, 10, 5, 2, linear), torch.randn(2, 7, 6)
    plain = torch.autograd.grad(experts(x_BLD)[0].sum(), list(experts.parameters()))
    y_BLD, _ = checkpoint(experts, x_BLD.requires_grad_(), use_reentrant=False)
    again = torch.autograd.grad(y_BLD.sum(), list(experts.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"experts": 1}, "the model's experts is 1; it must lie between 2 and 1024"),
        ({"experts_per_token": 5}, "experts_per_token is 5; it must lie between 1 and 4"),
        ({"experts_per_token": None}, "experts_per_token is None; it must lie"),
        ({"balance": 2.0}, "balance is 2.0; it must lie between 0 and 1, commonly 0.01"),
        ({"balance": float("nan")}, "balance is nan"),
        ({"experts": None}, "are for a model with experts; set experts, or leave them out"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(changes, sentence):
    with pytest.raises(ValueError, match="; ") as caught:
        ModelConfig(**(msgspec.structs.asdict(EXPERTS) | changes))
    assert sentence in str(caught.value)


def test_a_folder_with_experts_is_read_back(tmp_path):
    folder = write_model(tmp_path / "m", EXPERTS, seed=5)
    read = config_in(folder)
    assert read == EXPERTS
    model = initial(read, 0, WeightsFolder(folder, read))
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), build(EXPERTS, 5).parameters(), strict=True)
    )


def test_an_export_is_a_mixtral_with_equal_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, (x, _) = build(EXPERTS, 9), tokens()
    weights = dict(model.named_parameters())
    export(tmp_path / "out", EXPERTS, weights, ByteTokenizer(), "# card")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(other).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        assert float((model(x) - other(x).logits).abs().max()) <= 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kept", [0, 5])
def test_the_balance_counts_as_the_targets_do(reduction, kept):
    """A mean has it once, if any target counts; a sum as often as targets count."""
    model, (x, y) = build(EXPERTS, 3), tokens()
    y = y.flatten().masked_fill(torch.arange(32) >= kept, IGNORED).view_as(y)
    unbalanced = build(msgspec.structs.replace(EXPERTS, balance=0.0), 3)
    times = min(kept, 1) if reduction == "mean" else kept
    extra = 0.01 * times * torch.stack(balances(model, x)).mean()
    added = torch.autograd.grad(extra, list(model.parameters()), allow_unused=True)
    wanted = gradients(unbalanced(x, y, reduction), unbalanced)
    found = gradients(model(x, y, reduction), model)
    for (name, _), more in zip(model.named_parameters(), added, strict=True):
        both = wanted[name] if more is None else wanted[name] + more
        torch.testing.assert_close(found[name], both, rtol=1e-4, atol=1e-7 * max(times, 1))
    assert bool(found[ROUTER].any()) == (kept > 0)
