"""The loss in chunks of tokens equals the whole one, and no more logits exist than it says."""

from itertools import accumulate

import msgspec
import pytest
import torch
from worlds.card import CARD

from farflock.node.model import loss
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import ModelConfig, build, cross_entropy
from farflock.node.model.loss import IGNORED

CONFIG = ModelConfig(vocab_size=97, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, context=32)
UNTIED = msgspec.structs.replace(CONFIG, tied=False)
CPU_MEMORY = torch.profiler.ProfilerActivity.CPU
WIDE = msgspec.structs.replace(CONFIG, vocab_size=16_384, dim=8)


@pytest.fixture(params=[1, 7, 16, 63], ids="{} tokens".format)
def chunked(request, monkeypatch):
    """Let the logits of this many tokens, of 64, be all that fits."""
    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * request.param)


@pytest.fixture(params=[CONFIG, UNTIED], ids=["tied", "untied"])
def model(request):
    return build(request.param, 1)


def batch(config):
    """Return tokens and targets, of 4 sequences of 16."""
    ids = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (2, 4, 16), generator=ids)


def gradients(model, loss):
    """Return a loss and its gradients, by name."""
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_the_whole_logits(model, kind, reduction, chunked):
    model, (x, y) = model.to(kind), batch(CONFIG)
    ours = gradients(model, model(x, y, reduction) / 3)
    whole = gradients(model, cross_entropy(model(x), y, reduction) / 3)
    assert ours.keys() == whole.keys()
    for name, wanted in whole.items():
        torch.testing.assert_close(ours[name], wanted, msg=name)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_with_autocast_gradients_are_as_near_to_the_exact_ones(model, kind, chunked):
    x, y = batch(CONFIG)
    exact = gradients(model, cross_entropy(model(x), y))
    with torch.autocast("cpu", kind):
        ours = gradients(model, model(x, y))
        whole = gradients(model, cross_entropy(model(x), y))
    for name, wanted in exact.items():
        away, usual = (one[name].sub(wanted).norm() for one in (ours, whole))
        assert ours[name].dtype == torch.float32
        assert away <= 1.5 * usual + 1e-3 * wanted.norm(), name


def test_without_gradients_it_is_the_same_loss(model, chunked):
    x, y = batch(CONFIG)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y), cross_entropy(model(x), y))
        each = cross_entropy(model(x), y, "none")
        torch.testing.assert_close(model(x, y, "none"), each)
    torch.testing.assert_close(losses(model, x, y, batch_size=3), each.double().mean(dim=1))


def test_one_chunk_is_the_whole_loss_bit_for_bit(model):
    x, y = batch(CONFIG)
    ours, whole = gradients(model, model(x, y)), gradients(model, cross_entropy(model(x), y))
    assert all(torch.equal(ours[name], wanted) for name, wanted in whole.items())


@pytest.mark.parametrize("frozen", [("lm_head.weight",), ("model.norm.weight", "model.layers")])
def test_frozen_weights_get_no_gradient(frozen, monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * 7)
    model, (x, y) = build(UNTIED, 1), batch(UNTIED)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(frozen))
    ours = gradients(model, model(x, y))
    whole = gradients(model, cross_entropy(model(x), y))
    for name, wanted in whole.items():
        assert (ours[name] is None) == name.startswith(frozen)
        torch.testing.assert_close(ours[name], wanted)


def test_a_second_backward_pass_is_refused(monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", 97)
    found = build(CONFIG, 1)(*batch(CONFIG))
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        found.backward()


def peak(model, run):
    """Return the bytes that a run takes at most on the card, beside the model."""
    CARD.reset_counters()
    before = CARD.used_bytes
    run()
    return CARD.peak_bytes - before


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_never_exist_whole(card, monkeypatch, autocast):
    model, (x, y) = build(WIDE, 1).to(card), batch(WIDE).to(card)
    table = 4 * WIDE.vocab_size * WIDE.dim  # bytes
    logits = 4 * WIDE.vocab_size * y.numel()

    def train(loss_of):
        def run():
            with torch.autocast("card", torch.bfloat16, enabled=autocast):
                found = loss_of()
            found.backward()
            model.zero_grad()

        return run

    whole = peak(model, train(lambda: cross_entropy(model(x), y)))
    monkeypatch.setattr(loss, "MAX_LOGITS", WIDE.vocab_size)
    chunked = peak(model, train(lambda: model(x, y)))
    assert whole > 2 * logits
    assert chunked < logits / 2
    assert chunked < 3.1 * table  # the card adds the head's and the look-up's out of place
    with torch.no_grad():
        assert peak(model, lambda: model(x, y, "none")) < table


def test_a_tied_tables_gradients_are_added_in_place(monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", 2 * WIDE.vocab_size)
    model, (x, y) = build(WIDE, 1), batch(WIDE)[:, :1]
    with torch.profiler.profile(activities=[CPU_MEMORY], profile_memory=True) as profile:
        model(x, y).backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert max(accumulate(sizes)) < 2.8 * 4 * WIDE.vocab_size * WIDE.dim


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_compiled_computes_what_is_done_in_place(kind):
    chance = torch.Generator().manual_seed(2)
    logits = (9 * torch.randn(5, 97, generator=chance)).to(kind)
    targets = torch.randint(97, (5,), generator=chance)
    total, gradient = loss.fusible(logits.clone(), targets, torch.float32)
    wanted, exact = loss.in_place(logits, targets, torch.float32)
    torch.testing.assert_close(total, wanted)
    assert gradient.dtype == kind
    torch.testing.assert_close(gradient, exact.to(kind))


def test_large_devices_hold_more_logits_at_once():
    gib = 2**30
    assert [loss.logits_at_once(size * gib) // 2**25 for size in (1, 8, 24, 40, 80, 800)] == [
        *(1, 1, 1, 2, 4, 4)
    ]
    assert loss.chunk_tokens(1000, 5000) == 5


# targets that are left out

UNSEEN = loss.MAX_LOGITS // CONFIG.vocab_size  # as many logits as may exist: all of them at once


def left_out(y, kept=0.4):
    """The same targets, of which some are left out, all those of the first sequence among them."""
    chance = torch.rand(y.shape, generator=torch.Generator().manual_seed(5))
    chance[0] = 1.0
    return torch.where(chance < kept, y, IGNORED)


def of_those_that_count(model, x, y, reduction):
    """The slow twin: torch's loss of the logits at the targets that are left."""
    counts = y.flatten() != IGNORED
    logits = model(x).flatten(0, 1)[counts]
    return torch.nn.functional.cross_entropy(logits, y.flatten()[counts], reduction=reduction)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [7, UNSEEN])
def test_a_target_that_is_left_out_has_no_loss_and_no_gradient(
    model, kind, reduction, tokens, monkeypatch
):
    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * tokens)
    model, (x, y) = model.to(kind), batch(CONFIG)
    y = left_out(y)
    ours = gradients(model, model(x, y, reduction) / 3)
    wanted = gradients(model, of_those_that_count(model, x, y, reduction) / 3)
    for name, exact in wanted.items():
        torch.testing.assert_close(ours[name], exact, msg=name)
    with torch.no_grad():
        each = model(x, y, "none")
        assert not each[y == IGNORED].any()
        torch.testing.assert_close(each.sum(), of_those_that_count(model, x, y, "sum"))
        torch.testing.assert_close(model(x, y, reduction), ours["loss"] * 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [7, UNSEEN])
def test_the_loss_of_no_target_is_zero_and_so_are_its_gradients(
    model, kind, reduction, tokens, monkeypatch
):
    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * tokens)
    x, y = batch(CONFIG)
    with torch.autocast("cpu", kind, enabled=kind != torch.float32):
        found = gradients(model, model(x, torch.full_like(y, IGNORED), reduction))
    assert not any(each.any() or each.isnan().any() for each in found.values())
    assert len(found) > 1


def test_a_loss_that_is_not_finite_is_not_taken_for_one_of_no_target(model, chunked):
    model.model.norm.weight.data.fill_(torch.nan)
    x, y = batch(CONFIG)
    assert model(x, left_out(y)).isnan()


def plain_chunk(logits_CV, targets_C, sums):
    """A chunk's loss and gradient, as they are if every target counts."""
    values = logits_CV.to(sums)
    top = values.amax(1)
    at_targets = values.gather(1, targets_C[:, None])[:, 0] - top
    divisors = values.sub_(top[:, None]).exp_().sum(1)
    losses = divisors.log() - at_targets
    values.div_(divisors[:, None])
    ones = -torch.ones_like(divisors)[:, None]
    return losses.sum(), values.scatter_add_(1, targets_C[:, None], ones)


@pytest.mark.parametrize("tokens", [7, 64, UNSEEN])
def test_where_every_target_counts_no_bit_depends_on_what_might_be_left_out(
    model, tokens, monkeypatch
):
    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * tokens)
    x, y = batch(CONFIG)
    ours = gradients(model, model(x, y))
    if tokens < y.numel():
        model.chunk_loss = plain_chunk
        plain = model(x, y, "sum") / y.numel()
    else:
        plain = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    wanted = gradients(model, plain)
    assert all(torch.equal(ours[name], exact) for name, exact in wanted.items())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_compiled_leaves_out_the_same_targets(kind):
    chance = torch.Generator().manual_seed(2)
    logits = (9 * torch.randn(5, 97, generator=chance)).to(kind)
    targets = torch.tensor([IGNORED, 3, IGNORED, 96, 0])
    total, gradient = loss.fusible(logits.clone(), targets, torch.float32)
    wanted, exact = loss.in_place(logits.clone(), targets, torch.float32)
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(gradient, exact.to(kind))
    assert not exact[targets == IGNORED].any()


@pytest.mark.parametrize("tokens", [7, UNSEEN])
def test_the_loss_of_labels_is_that_of_transformers(tokens, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from farflock.node.model.hf_config import hugging_face_config

    monkeypatch.setattr(loss, "MAX_LOGITS", CONFIG.vocab_size * tokens)
    model = build(UNTIED, 1)
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hugging_face_config(UNTIED)))
    other.load_state_dict(model.state_dict())
    ids = batch(CONFIG)[0]
    labels = left_out(ids)  # which transformers shifts itself
    theirs = other(ids, labels=labels).loss
    ours = model(ids[:, :-1], labels[:, 1:])
    assert abs(float(ours.detach()) - float(theirs.detach())) <= 1e-5
    theirs.backward()
    expected = {name: weight.grad for name, weight in other.named_parameters()}
    found = gradients(model, ours)
    for name, exact in expected.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-4, atol=1e-6)


def test_counted_targets_and_their_share():
    y = torch.tensor([[1, IGNORED, 3], [IGNORED, IGNORED, 0]])
    assert loss.counted_targets(y) == 3
    assert float(loss.counted_share(y, torch.zeros(()))) == 0.5
    every = torch.zeros(1, 49, dtype=torch.int64)
    assert float(loss.counted_share(every, torch.zeros((), dtype=torch.float64))) == 1.0
