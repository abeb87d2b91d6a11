"""The device that CI has behaves as a real one where that matters to tests."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from worlds.card import CARD, NAME, OutOfMemory, is_on_card


@pytest.fixture(autouse=True)
def plugged(card):
    CARD.reset_counters()


def test_values_go_there_and_come_back():
    values = torch.randn(3, 5).t()
    there = values.to(NAME)
    assert is_on_card(there)
    assert there.shape == (5, 3)
    assert torch.equal(there.cpu(), values)
    assert (CARD.to_card_bytes, CARD.from_card_bytes) == (60, 60)


def test_views_share_memory_and_changes_in_place_are_seen():
    whole = torch.zeros(4, 6, device=NAME)
    before = CARD.used_bytes
    whole[1:3].t()[2:].add_(1)
    assert CARD.used_bytes == before
    assert whole.sum().item() == 8
    assert whole.detach().view(2, 12).is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_trains_there_as_on_the_cpu(fused):
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    there = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    there.load_state_dict(here.state_dict())
    there.to(NAME)
    x, y = torch.randn(10, 8), torch.randint(0, 4, (10,))
    for model, device in ((here, "cpu"), (there, NAME)):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused and device == NAME)
        for _ in range(3):
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_autocast_multiplies_in_the_smaller_type_and_sums_losses_in_float32():
    layer = torch.nn.Linear(4, 4, device=NAME)
    with torch.autocast(NAME, torch.bfloat16):
        out = layer(torch.ones(2, 4, device=NAME))
        assert out.dtype == torch.bfloat16
        assert F.cross_entropy(out, torch.zeros(2, dtype=torch.long, device=NAME)).dtype == (
            torch.float32
        )
    assert layer.weight.dtype == torch.float32


def test_activations_are_computed_again_by_checkpointing():
    x = torch.randn(4, 4, device=NAME, requires_grad=False).requires_grad_()
    torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
    assert torch.allclose(x.grad.cpu(), 1 - torch.tanh(x.detach().cpu()) ** 2)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: F.linear(x, y),
        lambda x, y: torch.cat((x, y)),
        lambda x, y: x.masked_fill(y > 0, 0.0),
    ],
)
def test_a_tensor_of_the_cpu_is_refused_beside_one_of_the_card(mixed):
    with pytest.raises(RuntimeError, match="on the same device"):
        mixed(torch.randn(3, 3).to(NAME), torch.randn(3, 3))


def test_a_number_of_the_cpu_is_no_mixture():
    assert (torch.ones(2, device=NAME) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_an_address_is_not_read():
    there = torch.ones(2, device=NAME)
    with pytest.raises(TypeError, match="card"):
        there.numpy()
    with pytest.raises(RuntimeError, match="no address"):
        there.data_ptr()
    with pytest.raises(RuntimeError):  # it would write whatever lies at the address 0
        save({"x": there})


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="generator of the card"):
        torch.empty(3, device=NAME).normal_(generator=torch.Generator())


def test_it_is_full_and_has_room_again_once_a_tensor_ends():
    CARD.leave_free(1000)
    held = torch.zeros(200, device=NAME)
    with pytest.raises(OutOfMemory, match="tried to allocate 400 bytes"):
        torch.zeros(100, device=NAME)
    del held
    assert torch.zeros(100, device=NAME).numel() == 100
    assert CARD.peak_bytes <= CARD.capacity_bytes


def test_each_value_that_python_reads_is_a_wait():
    x = torch.ones(3, device=NAME)
    waits = CARD.waits
    assert x.sum().item() == 3
    assert bool((x > 0).all())
    assert CARD.waits == waits + 2
