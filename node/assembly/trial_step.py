"""True steps before a run's state is there: how much of a batch does a device compute at once?

They are taken by the task that will train, on a model of the same shape whose weights mean nothing:
it is built on the device itself, so the host needs no memory for it.
"""

from dataclasses import replace

import numpy as np
import torch

from farflock.node.assembly.node import task_of
from farflock.node.data.samples import text_in_memory
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.device import Device, is_out_of_memory
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.step_options import StepOptions
from farflock.node.run.terms import RunPlan
from farflock.node.train.task import NoRoom
from farflock.optimizers.catalog import METHODS, unfolded
from farflock.optimizers.method import Progress

STEPS = 2  # the inner optimizer has its moments only from the first step on


def fitting(
    plan: RunPlan, device: Device, options: StepOptions, beside_bytes: int = 0
) -> StepOptions | None:
    """Return the options with how many sequences of a batch the device computes at once, beside so
    many bytes of other tensors: those of the options, or a half of them, and so on, until there is
    room. If there is none even for one, layers are computed again for their gradients, unless the
    options say otherwise; None if that does not help. Nothing stays on the device. Layers are not
    compiled for it."""
    again = [replace(options, checkpointing="on")] if options.checkpointing == "auto" else []
    for chosen in (options, *again):
        device.release()
        found = _tried(plan, device, replace(chosen, compile="off"), beside_bytes)
        device.release()  # not in `_tried`: an error there holds the frames of its pass
        if found is not None:
            return replace(chosen, micro_batch=found)
    return None


def _tried(plan: RunPlan, device: Device, options: StepOptions, beside_bytes: int) -> int | None:
    try:
        beside = torch.empty(beside_bytes, dtype=torch.uint8, device=device.place)
        found = _stepped(plan, device, options)
        del beside
        return found
    except NoRoom:
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def _stepped(plan: RunPlan, device: Device, options: StepOptions) -> int:
    model = _blank(plan.model, device)
    text = text_in_memory(np.zeros(plan.seq + 1, dtype="<u2"))
    batches = Batches(text, SampleStream(0, ""), plan.batch, plan.seq)
    # a third batch takes no more memory than a second one
    plan = replace(plan, accumulate=min(plan.accumulate, 2))
    task = task_of(plan, model, batches, device, options)
    task.trial = True
    for step in range(STEPS):
        if METHODS[unfolded(plan.method)[0]].keeps_gradients:
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
        task.forward_backward(step, Progress(step))
        task.replica.inner_step()
    return task.micro_batches.at_once


def _blank(config: ModelConfig, device: Device) -> Llama:
    """Return a model whose weights are small enough for any precision."""
    with device.place:
        model = Llama(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 1 / config.dim)
    return model
