"""Activation checkpointing changes no bit and keeps as little as reckoned; compiling is for
devices where it pays."""

from dataclasses import replace

import msgspec
import pytest
import torch
from worlds.card import CARD

from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.step_options import StepOptions, activation_bytes

CONFIG = ModelConfig(vocab_size=61, dim=96, layers=3, heads=4, kv_heads=2, ffn_dim=256, context=64)


def batch():
    """Return tokens and targets, of 2 sequences of 64."""
    return torch.randint(61, (2, 2, 64), generator=torch.Generator().manual_seed(4))


def model_of(checkpointing, **changes):
    model = build(msgspec.structs.replace(CONFIG, **changes), 1)
    model.checkpointing = checkpointing
    return model


def step(model, lower):
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        loss = model(x, y)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpointing_changes_no_bit(lower, tied):
    plain, ours = (step(model_of(on, tied=tied), lower) for on in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(plain, ours, strict=True))


def kept(model, lower):
    """Return the bytes that a forward pass keeps for the backward pass, per token; without weights,
    tables of angles and logits."""
    seen, alive = {}, []
    own = [*model.parameters(), *model.buffers()]
    known = {x.untyped_storage().data_ptr() for x in own}
    config = model.config
    shapes = {tuple(x.shape) for x in model.parameters()} | {(64, config.head_dim)}
    shapes |= {shape[::-1] for shape in shapes} | {(2 * 64, config.vocab_size)}

    def pack(x):
        alive.append(x)  # no other tensor may get its address
        address = x.untyped_storage().data_ptr()
        if address not in known and tuple(x.shape) not in shapes:
            seen[address] = x.untyped_storage().nbytes()
        return x

    x, y = batch()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=lower),
    ):
        model(x, y)
    return sum(seen.values()) / y.numel()


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 1, "kv_heads": 4},
        {"ffn_dim": 72},
        {"architecture": "qwen2"},
        {"architecture": "qwen3", "head_width": 40},
    ],
)
def test_what_is_kept_is_what_was_reckoned(lower, changes):
    model = model_of(False, **changes)
    expected = activation_bytes(model.config, lower, checkpointing=False)
    assert 0 <= kept(model, lower) - expected < 1  # beside the loss's own few numbers


def test_checkpointing_keeps_what_enters_each_layer(card):
    few, many = (activation_bytes(CONFIG, False, checkpointing=on) for on in (True, False))
    assert few < many / 2

    def peak(checkpointing):
        model = model_of(checkpointing, layers=8).to(card)
        x, y = batch().to(card)
        model(x, y).backward()  # gradients are there from now on
        CARD.reset_counters()
        before = CARD.used_bytes
        model(x, y).backward()
        return (CARD.peak_bytes - before) / y.numel()

    deep = msgspec.structs.replace(CONFIG, layers=8)
    few, many = (activation_bytes(deep, False, checkpointing=on) for on in (True, False))
    assert peak(True) < 2.5 * few < many
    assert peak(False) > many


def test_layers_are_compiled_where_it_pays_or_where_it_is_wanted():
    device, auto = Device(), StepOptions()
    assert not auto.compiles_on(device)
    assert auto.compiles_on(replace(device, place=torch.device("cuda")))
    assert not auto.compiles_on(replace(device, place=torch.device("mps")))
    assert StepOptions(compile="on").compiles_on(device)
    assert not StepOptions(compile="off").compiles_on(replace(device, place=torch.device("cuda")))
    assert [StepOptions(on).checkpoints for on in ("auto", "on", "off")] == [False, True, False]
