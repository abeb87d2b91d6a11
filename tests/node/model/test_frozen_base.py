"""Frozen weights in fewer bits: what they compute, what they take, and where they cannot be had.

NF4 needs bitsandbytes; without it, its tests are skipped.
"""

import importlib.util
import sys
import weakref

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from worlds.card import CARD

from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.device import Device
from farflock.node.model.frozen_base import (
    BASE_PRECISIONS,
    BaseUnavailable,
    FrozenLinear,
    frozen_bytes,
    frozen_model,
    frozen_product,
    hold_base,
    obstacle_to,
)
from farflock.node.model.generate import GREEDY, generate
from farflock.node.model.llama import PRESETS, ModelConfig, build, initialize
from farflock.node.model.lora import (
    ADAPTER_TARGETS,
    LoraTerms,
    adapted_layers,
    add_adapters,
    merge_adapters,
)
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.tokens.tokenizer import ByteTokenizer

HAS_NF4 = importlib.util.find_spec("bitsandbytes") is not None
NF4 = pytest.param("nf4", marks=pytest.mark.skipif(not HAS_NF4, reason="it needs bitsandbytes"))
FEWER = ["bf16", "int8", NF4]
TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False)
EXPERTS = msgspec.structs.replace(UNTIED, experts=3, experts_per_token=2, balance=0.01)
ODD = msgspec.structs.replace(TINY, ffn_dim=37)  # blocks of NF4 end within a row, and half a byte
CONFIGS = [TINY, UNTIED, EXPERTS]
TERMS = LoraTerms(r=4, alpha=8)
# How far logits may be from those of float32 weights, as a share of their norm.
AWAY = {"fp32": 1e-6, "bf16": 0.01, "int8": 0.03, "nf4": 0.3}


@pytest.fixture(autouse=True)
def uncompiled():
    """bitsandbytes compiles its code for devices that it does not know, such as the double."""
    with torch.compiler.set_stance("force_eager"):
        yield


def batch(config=TINY):
    """Tokens and targets of 2 sequences of 24."""
    chance = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (2, 2, 24), generator=chance)


def frozen(config=TINY):
    return build(config, 1).requires_grad_(False)


def held(config, precision, *, place="cpu", terms=TERMS):
    """A model in this precision, with adapters that have values as of training."""
    model = frozen(config).to(place)
    hold_base(model, precision)
    return with_adapters(model, terms)


def with_adapters(model, terms=TERMS):
    add_adapters(model, terms, 7)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            values = torch.empty(layer.lora_B.weight.shape).normal_(0, 0.1, generator=chance)
            layer.lora_B.weight.copy_(values)
    return model


def linear(precision, rows=6, columns=40):
    """A frozen layer, the weight that it was made of, and activations."""
    chance = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(size, columns, generator=chance) for size in (rows, 5))
    layer = FrozenLinear(weight, None, (rows, columns))
    layer.hold(weight, precision)
    return layer, weight, x.requires_grad_()


class Made(TorchDispatchMode):
    """Notes the types of tensors of one shape that operators make."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.types = shape, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and tuple(made.shape) == self.shape:
            self.types.add(made.dtype)
        return made


def bytes_of(model):
    """What weights that are not trained take, with their scales."""
    angles = ("cos", "sin")
    kept = [x for x in model.parameters() if not x.requires_grad]
    kept += [x for name, x in model.named_buffers() if name not in angles]
    return sum(x.untyped_storage().nbytes() for x in kept)


@pytest.mark.parametrize("precision", ["fp32", *FEWER])
@pytest.mark.parametrize("config", [*CONFIGS, ODD])
def test_the_bytes_are_reckoned_without_a_model(config, precision):
    model = frozen(config)
    hold_base(model, precision)
    assert bytes_of(model) == frozen_bytes(config, precision)
    add_adapters(model, TERMS, 7)
    assert bytes_of(model) == frozen_bytes(config, precision)


def test_fewer_bits_take_less():
    large = [frozen_bytes(PRESETS["8b"], precision) for precision in BASE_PRECISIONS]
    layers = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336)
    assert large[0] == 4 * PRESETS["8b"].parameters()
    assert large[1] == pytest.approx(large[0] / 2, rel=1e-3)
    assert large[1] - large[2] == pytest.approx(layers, rel=2e-3)
    assert large[2] - large[3] == pytest.approx(layers * (1 / 2 - 1 / 16), rel=2e-3)


@pytest.mark.parametrize("precision", FEWER)
def test_a_layer_computes_with_its_whole_weight(precision):
    layer, _, x = linear(precision)
    y = layer(x)
    y.backward(torch.ones_like(y))
    wanted = F.linear(x.detach(), layer.whole())
    assert y.dtype == x.grad.dtype == torch.float32
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, layer.whole().sum(0).expand(x.shape))
    assert layer.weight.grad is None


def test_bf16_is_the_nearest_value():
    layer, weight, _ = linear("bf16")
    assert torch.equal(layer.whole(), weight.bfloat16().float())


def test_int8_is_within_half_a_step_of_each_row():
    layer, weight, _ = linear("int8")
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((layer.whole() - weight).abs() <= steps * 0.5001).all())
    assert layer.weight.dtype == torch.int8
    assert layer.weight.abs().amax(1).tolist() == [127] * 6
    zeros = torch.zeros(2, 8)
    layer.hold(zeros, "int8")
    assert torch.equal(layer.whole(), zeros)


@pytest.mark.skipif(not HAS_NF4, reason="it needs bitsandbytes")
def test_int8_and_nf4_are_those_of_bitsandbytes():
    import bitsandbytes.functional as bnb

    layer, weight, _ = linear("int8", 16, 64)
    layer.hold(weight.half().float(), "int8")  # its int8 is made of such values
    values, tops, _ = bnb.int8_vectorwise_quant(weight.half())
    assert int((values - layer.weight).abs().max()) <= 1  # where a value is between two levels
    assert float((values != layer.weight).float().mean()) < 0.01
    torch.testing.assert_close(layer.scales * 127, tops)
    layer.hold(weight, "nf4")
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(layer.weight, packed)
    assert torch.equal(layer.whole(), bnb.dequantize_4bit(packed, state))
    assert float((layer.whole() - weight).abs().max() / weight.abs().max()) < 0.16


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_in_fewer_bits_is_near_the_whole_one(config, precision, elsewhere):
    model, (x, y) = held(config, precision, place=elsewhere), batch(config)
    exact = held(config, "fp32")
    with torch.no_grad():
        ours, wanted = model(x.to(elsewhere)).cpu(), exact(x)
    assert 0 < (ours - wanted).norm() <= AWAY[precision] * wanted.norm()
    model(x.to(elsewhere), y.to(elsewhere)).backward()
    exact(x, y).backward()
    by_name = dict(exact.named_parameters())
    for name, weight in model.named_parameters():
        grad, near = weight.grad, by_name[name].grad
        assert (grad is None) == (near is None)
        if grad is not None:
            assert (grad.cpu() - near).norm() <= 2 * AWAY[precision] * near.norm(), name


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_the_loss_in_chunks_is_that_of_whole_logits(config, autocast, precision):
    model, (x, y) = held(config, precision), batch(config)
    found = []
    for at_once in (None, config.vocab_size * 10):
        model.logits_at_once = at_once
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, y)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters() if p.requires_grad]))
        model.zero_grad()
    rounding = {"rtol": 0.02, "atol": 1e-3} if autocast else {}
    torch.testing.assert_close(found[0][0], found[1][0], **rounding)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one - other).norm() <= (0.1 if autocast else 1e-5) * one.norm()


@pytest.mark.parametrize("precision", FEWER)
def test_with_autocast_products_are_in_its_type(precision):
    layer, _, x = linear(precision)
    with torch.autocast("cpu", torch.bfloat16):
        with Made(layer.shape) as made:
            y = layer(x)
        wanted = F.linear(x, layer.whole())
    assert torch.float32 not in made.types
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted)
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad[0], layer.whole().sum(0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_kept_for_gradients_that_is_larger_than_held(precision, checkpointing):
    wide = ModelConfig(
        vocab_size=2048, dim=64, layers=2, heads=2, kv_heads=2, ffn_dim=512, context=8
    )
    model, kept = held(wide, precision), []
    model.checkpointing = checkpointing
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept.append(x.numel())
        return x

    x, y = (torch.arange(4)[None] for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(x, y)
    assert kept
    assert max(kept) <= 4 * wide.vocab_size  # the logits; no layer's weight and no table
    loss.backward()


def test_the_head_is_multiplied_as_it_is_held():
    model = held(UNTIED, "bf16")
    assert model.lm_head.weight.dtype == torch.bfloat16
    x = torch.randn(2, 3, UNTIED.dim, generator=torch.Generator().manual_seed(4))
    y = frozen_product(x.requires_grad_(), model.lm_head.weight)
    assert y.dtype == torch.float32
    assert torch.equal(y, F.linear(x, model.lm_head.weight.float()))


@pytest.mark.parametrize("precision", FEWER)
def test_a_held_model_writes_and_merges(precision):
    terms = LoraTerms(r=2, alpha=4, targets=ADAPTER_TARGETS)
    model, (x, _) = held(TINY, precision, terms=terms), batch()
    said = generate(model, ByteTokenizer(), "To be", 12, sampling=GREEDY)
    logits = model(x)
    merge_adapters(model)
    torch.testing.assert_close(model(x), logits)
    assert generate(model, ByteTokenizer(), "To be", 12, sampling=GREEDY) == said


@pytest.mark.parametrize("precision", ["fp32", *FEWER])
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_are_read_and_held_one_at_a_time(config, precision):
    """The float32 tensor of one weight is gone before the next is there, unless it is kept."""
    wanted, given = frozen(config), []
    hold_base(wanted, precision)

    def fill(name, weight):
        assert weight.dtype == torch.float32
        assert weight.is_cpu
        if precision != "fp32":
            left = [one for one, ref in given if ref() is not None]
            assert all(one.endswith(("norm.weight", ".gate.weight")) for one in left)
        given.append((name, weakref.ref(weight.untyped_storage())))
        initialize(weight, name, config, 1)

    model = frozen_model(config, fill, precision)
    assert [name for name, _ in given] == list(shapes_of(config, range(config.layers)))
    ours, theirs = dict(model.named_parameters()), dict(wanted.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) and not x.requires_grad for name, x in ours.items())
    with torch.no_grad():
        assert torch.equal(model(batch(config)[0]), wanted(batch(config)[0]))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_model_is_read_onto_its_device(accelerator, precision):
    model = frozen_model(
        TINY, lambda name, weight: initialize(weight, name, TINY, 1), precision, accelerator
    )
    there = accelerator.type
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {there}
    x = batch()[0]
    ours = with_adapters(model)(x.to(accelerator)).cpu()
    torch.testing.assert_close(ours, held(TINY, precision)(x), rtol=1e-4, atol=1e-5)


def test_a_weight_is_gone_once_it_is_held(card):
    model = frozen(msgspec.structs.replace(UNTIED, vocab_size=4096)).to(card)
    CARD.reset_counters()
    before = CARD.used_bytes
    hold_base(model, "bf16")
    CARD.sweep()
    assert CARD.used_bytes < 0.55 * before
    assert CARD.peak_bytes < 1.3 * before  # two bytes a value of the largest, and of no other


@pytest.mark.parametrize("precision", FEWER)
def test_adapters_may_come_before_or_after(precision):
    first, second = frozen(), frozen()
    hold_base(first, precision)
    add_adapters(first, TERMS, 7)
    add_adapters(second, TERMS, 7)
    hold_base(second, precision)
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert torch.equal(first(batch()[0]), second(batch()[0]))
    assert all(x.dtype == torch.float32 for x in theirs.values() if x.requires_grad)


def test_weights_that_are_trained_stay_whole():
    model = frozen()
    model.model.layers["0"].requires_grad_(True)
    hold_base(model, "int8")
    kinds = {name: x.dtype for name, x in model.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.float32
    assert kinds["model.layers.1.mlp.up_proj.weight"] == torch.int8
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16
    assert kinds["model.norm.weight"] == torch.float32


def test_routers_of_experts_stay_whole():
    model = frozen(EXPERTS)
    hold_base(model, "int8")
    kinds = {name: x.dtype for name, x in model.named_parameters() if "sparse_moe" in name}
    assert all((x == torch.int8) != name.endswith(".gate.weight") for name, x in kinds.items())
    assert len(set(kinds.values())) == 2


def test_what_lost_its_bits_is_not_held_again():
    model = frozen()
    hold_base(model, "int8")
    with pytest.raises(ValueError, match=r"held as torch\.bfloat16 already, .* read the model"):
        hold_base(model, "bf16")


@pytest.mark.parametrize("precision", BASE_PRECISIONS[:3])
def test_these_precisions_need_nothing(precision, single):
    assert obstacle_to(precision, Device()) == obstacle_to(precision, single) == ""


@pytest.mark.skipif(not HAS_NF4, reason="it needs bitsandbytes")
def test_nf4_is_tried_on_the_device(single):
    assert obstacle_to("nf4", Device()) == obstacle_to("nf4", single) == ""


def test_without_bitsandbytes_nf4_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert 'pip install "farflock[quantized]"' in obstacle_to("nf4", Device())
    with pytest.raises(BaseUnavailable, match="computed by the package bitsandbytes"):
        hold_base(frozen(), "nf4")


def test_on_apples_gpus_nf4_is_refused_in_words():
    assert "code that is not part of it" in obstacle_to("nf4", Device(torch.device("mps")))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("raise RuntimeError('no kernel image\\n is available')", "no kernel image is available"),
        ("", "has no attribute"),
    ],
)
def test_a_device_without_its_kernels_is_named(made, why, monkeypatch, tmp_path):
    """A package stands in for bitsandbytes; it must not find the one that loads code."""
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "bitsandbytes.py").write_text(
        f"found = True\ntry:\n    import kernels\nexcept ImportError:\n    found = False\n{made}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bitsandbytes", "kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.ops, "bitsandbytes", torch.ops.farflock_has_none, raising=False)
    said = obstacle_to("nf4", Device(name="the Old Card"))
    assert said.startswith("bitsandbytes does not compute on the Old Card")
    assert why in said
    assert "\n" not in said
    if not made:
        assert not sys.modules["bitsandbytes"].found
    assert "kernels" not in sys.modules


@pytest.mark.ci_more
@pytest.mark.parametrize("precision", FEWER)
def test_compiled_layers_compute_the_same(precision):
    torch._dynamo.reset()
    model, (x, y) = held(TINY, precision), batch()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x, y)
        found.backward()
        grads = [weight.grad for weight in model.parameters() if weight.requires_grad]
        model.zero_grad()
        return found.detach(), grads

    plain = step()
    with torch.compiler.set_stance("default"):
        layers = CompiledLayers(model, "aot_eager")
        with torch.autocast("cpu", torch.bfloat16):
            layers.settle(2, lambda: model(x, y))
        assert not layers.failed
        ours = step()
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(ours[1], plain[1], strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
