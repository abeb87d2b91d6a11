"""A machine's device: what is chosen, how it is named, and what is refused."""

import psutil
import pytest
import torch
from worlds.card import CARD, NAME

from farflock.node.errors import Usage
from farflock.node.model.device import Device, choose, is_out_of_memory, require_outer


def test_without_an_accelerator_auto_is_the_cpu():
    assert choose("auto") == choose("cpu") == Device()


def test_auto_takes_the_accelerator_and_says_so(card):
    chosen = choose("auto")
    assert chosen.place == torch.device(NAME)
    assert str(chosen) == "Double Card, 1.1 of 1.1 GB free, bf16"
    assert choose(NAME) == chosen


def test_free_memory_is_what_tensors_left(card):
    free = choose("auto").memory()[0]
    held = torch.zeros(1000, device=NAME)
    assert choose("auto").memory() == (free - 4000, CARD.capacity_bytes)
    del held
    assert choose("auto").memory()[0] == free


def test_a_device_without_native_bf16_multiplies_in_fp16(card, monkeypatch):
    monkeypatch.setattr(CARD, "has_bf16", False)
    chosen = choose("auto")
    assert chosen.precision == "fp16"
    one = torch.ones(2, 2, device=card)
    with chosen.autocast():
        assert (one @ one).dtype == torch.float16


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("expected all tensors to be on the same device"), False),
        (MemoryError("of the host"), False),
    ],
)
def test_a_device_without_room_is_told_from_other_failures(error, said):
    assert is_out_of_memory(error) is said


def test_what_ended_is_given_back_even_in_a_cycle(card):
    choose().release()  # what other tests left
    free = choose().memory()[0]
    cycle = [torch.zeros(1000, device=card)]
    cycle.append(cycle)
    del cycle
    choose().release()
    assert choose().memory()[0] == free


def test_the_cpu_can_be_chosen_beside_an_accelerator(card):
    assert choose("cpu").place.type == "cpu"
    assert choose("cpu").precision == "fp32"


@pytest.mark.parametrize("wanted", ["cuda", "cuda:3", "mps", "xpu"])
def test_a_device_that_is_not_there_is_refused(wanted):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(Usage, match=f"--device {wanted}: torch .* finds only a CPU here"):
        choose(wanted)


def test_another_kind_of_device_is_refused(card):
    with pytest.raises(Usage, match="finds a device of type card here"):
        choose("xpu")


def test_a_device_beyond_the_last_one_is_refused(card):
    with pytest.raises(Usage, match="this machine has 1 of them, counted from 0; choose card:0"):
        choose(f"{NAME}:1")


@pytest.mark.parametrize("wanted", ["", "gpu", "cuda:", "cuda:x", "a" * 1000])
def test_a_name_of_no_device_is_refused(wanted):
    with pytest.raises(Usage, match="not a device's name") as refused:
        choose(wanted)
    assert len(str(refused.value)) < 300


def test_the_cpus_memory_is_the_machines():
    assert choose("cpu").memory()[1] <= psutil.virtual_memory().total


def test_outer_state_needs_a_device_that_computes_in_float64(card):
    require_outer(choose("auto"))
    with pytest.raises(Usage, match="--outer device: this peer trains on the CPU"):
        require_outer(choose("cpu"))
    with pytest.raises(Usage, match="Apple's GPU has no float64"):
        require_outer(Device(torch.device("mps"), "Apple's GPU", "fp16"))
    with pytest.raises(Usage, match="several processes are this peer"):
        require_outer(choose("auto"), alone=False)
