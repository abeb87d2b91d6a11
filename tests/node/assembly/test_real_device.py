"""What only a real device shows: `make gpu` runs these tests, and no other machine can.

The double (worlds/card.py) has no streams, no compiler, no memory of a card's size, and the CPU's
own arithmetic."""

import copy

import pytest
import torch

from farflock.node.assembly.node import task_of
from farflock.node.assembly.trial_step import fitting
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.device import Device, choose
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.step_options import StepOptions
from farflock.node.run.memory import StepChoices, min_device_bytes, needed_device_bytes
from farflock.node.run.terms import RunPlan
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

pytestmark = pytest.mark.gpu

BATCH, SEQ = 16, 512
MODEL = ModelConfig(dim=512, layers=8, heads=8, kv_heads=8, ffn_dim=1408, context=SEQ)
PLAIN = StepOptions(compile="off")
LIBRARIES = 128 * 2**20  # bytes: cuBLAS keeps a workspace from its first product on


@pytest.fixture
def real():
    """This machine's device, in its own precision, with nothing kept on it."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        pytest.skip("this machine has no device beside the CPU")
    device = choose()
    device.release()
    yield device
    device.release()


@pytest.fixture
def narrow(real):
    """A function that leaves this process so many bytes of the device, beside those taken now."""
    module = torch.get_device_module(real.place)
    if not hasattr(module, "set_per_process_memory_fraction"):
        pytest.skip(f"torch sets no limit to the memory of {real.name}")

    def leave(free):
        real.release()
        taken = module.memory_reserved()
        module.set_per_process_memory_fraction((taken + free) / real.memory()[1])

    yield leave
    module.set_per_process_memory_fraction(1.0)


def plan(model=MODEL, batch=BATCH, seq=SEQ):
    terms = 3, model, InnerConfig(lr=1e-3), Schedule(1e-3, 10**6), "local"
    return RunPlan(*terms, batch=batch, seq=seq)


def task(run, text, device, options=PLAIN):
    model = build(run.model, 3).to(device.place)
    return task_of(
        run, model, Batches(text, SampleStream(3, "peer"), run.batch, run.seq), device, options
    )


def stepped(made, steps):
    """Return the losses of the task's steps."""
    losses = []
    for step in range(steps):
        losses.append(float(made.forward_backward(step, Progress(step))))
        made.replica.inner_step()
    return losses


def peak_of_a_step(made, device):
    """Return the most bytes that a step takes once moments are there."""
    stepped(made, 1)
    device.begin_peak()
    made.forward_backward(1, Progress(1))
    made.replica.inner_step()
    return device.peak_bytes()


@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("lower", [True, False])
def test_what_is_reckoned_is_what_a_step_takes(text, real, lower, checkpointing):
    device = real if lower else Device(real.place, real.name, "fp32")
    run, before = plan(), device.begin_peak()
    made = task(run, text, device, StepOptions(checkpointing, "off"))
    taken = peak_of_a_step(made, device) - before
    choices = StepChoices(
        BATCH,
        on_device=True,
        checkpoints=checkpointing == "on",
        is_lower=device.precision != "fp32",
    )
    assert min_device_bytes(run) <= taken <= needed_device_bytes(run, choices) <= 1.6 * taken


def test_a_true_lack_of_memory_halves_what_is_computed_at_once(text, real, narrow):
    run = plan()
    whole = stepped(task(run, text, real), 4)
    narrow(needed_device_bytes(run, StepChoices(BATCH // 2, on_device=True, is_lower=True)))
    made = task(run, text, real)
    found = stepped(made, 4)
    assert 1 <= made.micro_batches.at_once < BATCH
    assert found == pytest.approx(whole, rel=2e-3)  # of products in bf16


def test_a_trial_finds_what_fits_and_leaves_nothing(real, narrow):
    run, before = plan(), real.begin_peak()
    narrow(needed_device_bytes(run, StepChoices(BATCH // 4, on_device=True, is_lower=True)))
    found = fitting(run, real, PLAIN)
    assert found.micro_batch in (BATCH // 8, BATCH // 4, BATCH // 2)  # memory lies in pieces
    assert real.begin_peak() <= before + LIBRARIES
    narrow(int(0.8 * min_device_bytes(run)))
    assert fitting(run, real, PLAIN) is None
    assert real.begin_peak() <= before + LIBRARIES


def test_compiled_layers_learn_as_plain_ones(text, real):
    run = plan()
    made = [task(run, text, real, StepOptions(compile=choice)) for choice in ("off", "on")]
    plain, ours = (stepped(each, 8) for each in made)
    assert made[1].compiled is not None
    assert not made[1].compiled.failed
    assert ours == pytest.approx(plain, rel=2e-3)
    assert plain[-1] < plain[0]


def test_fused_steps_are_those_of_the_cpu(text, real):
    run = plan(ModelConfig(dim=32, layers=2, heads=2, kv_heads=2, ffn_dim=64, context=64), 4, 64)
    single = Device(real.place, real.name, "fp32")
    there, here = (task(run, text, device) for device in (single, Device()))
    assert stepped(there, 20) == pytest.approx(stepped(here, 20), rel=1e-4)
    for name, x in there.module.named_parameters():
        other = here.module.get_parameter(name).detach()
        assert (x.detach().cpu() - other).norm() <= 1e-2 * other.norm(), name


def test_attention_and_loss_take_no_memory_of_their_squares(text, real):
    """Neither a sequence's attention nor a large vocabulary's logits are ever whole."""
    wide = ModelConfig(
        dim=256, layers=2, heads=4, kv_heads=4, ffn_dim=512, context=8192, vocab_size=128_256
    )
    run = plan(wide, batch=1, seq=8192)
    made = task(run, text, real)
    weights = 16 * wide.parameters()
    before = real.begin_peak()
    stepped(made, 1)
    logits, squares = 4 * wide.vocab_size * run.seq, 4 * wide.heads * run.seq**2
    taken = real.peak_bytes() - before
    assert taken < weights + 0.5 * logits
    assert taken < weights + squares


def test_copies_run_beside_computing(real):
    """A copy to the host that is begun first has ended before what was asked later has."""
    if real.place.type not in ("cuda", "xpu"):
        pytest.skip("only CUDA and XPU copy on streams of their own")
    from farflock.compression.payload import to_host

    x = torch.randn(1 << 20, device=real.place)
    wide = torch.randn(8192, 8192, device=real.place)
    expected = copy.deepcopy(x).cpu()
    real.wait()
    later = torch.cuda.Event() if real.place.type == "cuda" else torch.xpu.Event()
    values = x * 1.0
    side = torch.get_device_module(real.place).Stream()
    with torch.get_device_module(real.place).stream(side):
        for _ in range(20):
            wide = wide @ wide * 1e-4
        later.record()
    came = to_host(values)
    assert not later.query(), "the copy waited for another stream's products"
    assert torch.equal(came, expected)
    real.wait()
