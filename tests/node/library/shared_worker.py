"""One process of a program with a `SwarmOptimizer`: `shared_worker.py WRAPPER FOLDER WORD`.

The processes train one model, FSDP2's or DDP's, each on its rows of a batch. Rank 0 writes losses,
weights and what it knows of the swarm to FOLDER/0.json, the others what they know to FOLDER/1.json.
"""

import copy
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import farflock
from farflock.node.errors import FarflockError
from farflock.node.library.local_swarm import _LocalDoor, local_swarm
from farflock.node.library.swarm_optimizer import SwarmOptimizer

STEPS, ROWS, PERIOD = 8, 8, 3
TIMEOUT_S = 240.0


def net():
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for entry in model.parameters():
            entry.copy_(torch.randn(entry.shape, generator=generator) / 2)
    return model


def loss_of(model, step, part=0, parts=1):
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    return (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()


def with_norm():
    """The model with statistics, which each process takes of its own rows."""
    model = net()
    return nn.Sequential(model[0], nn.BatchNorm1d(9), *model[1:])


def wrapped(wrapper, make=net):
    model = make()
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    return model


def train(model, optimizer, part=0, parts=1):
    """Train with a scheduler; every other step computes its gradients in a closure."""
    schedule = farflock.scheduled(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9))
    losses = []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step, part, parts)
            loss.backward()
            return loss.detach()

        if step % 2:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        schedule.step()
        losses.append(float(loss))
    return losses


def facts_of(optimizer):
    round_ = optimizer.last_round
    return {
        "peer": optimizer.peer,
        "method": optimizer.method,
        "members": len(optimizer.members),
        "kind": type(optimizer).__name__,
        "twin": optimizer.twin,
        "tokens": optimizer.tokens,
        "steps": optimizer.run_steps(),
        "round": None if round_ is None else [round_.stream, round_.number, round_.status],
    }


def scaled(model, factor):
    """Change weights outside of a step."""
    with torch.no_grad():
        for entry in model.parameters():
            entry.mul_(factor)


def refusal(call):
    """Return the sentence with which a call is refused."""
    try:
        call()
    except FarflockError as error:
        return str(error)
    return ""


def here(entry):
    """The values of a parameter or a gradient in this process."""
    return (entry.to_local() if hasattr(entry, "to_local") else entry).detach()


def kept(model):
    return [here(entry).clone() for entry in model.parameters()]


SPOILED = 4  # the step whose gradients overflow, in one value


def scaled_steps(wrapper, rank=0, count=1):
    """Train under a scaler, and evaluate; return losses, scales, and what a block shows."""
    model = wrapped(wrapper)
    with local_swarm(1) as swarm:
        door = _LocalDoor(swarm, 0) if rank == 0 else None
        with SwarmOptimizer(model, "diloco", door, lr=0.05, period=PERIOD) as optimizer:
            scaler, losses, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10), [], []
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, step, rank, count)
                scaler.scale(loss).backward()
                first = here(next(model.parameters()).grad)
                if step == SPOILED and (wrapper != "fsdp" or rank == count - 1):
                    first[-1, -1] = torch.inf  # of shards, in the last rank's alone
                scaler.step(optimizer)
                scaler.update()
                losses.append(float(loss))
                scales.append(scaler.get_scale())
            before = kept(model)
            with optimizer.evaluating(), torch.no_grad():
                inside = float(loss_of(model, STEPS))
                no_step = refusal(optimizer.step)
            same = all(map(torch.equal, before, kept(model)))
            with torch.no_grad():
                after = float(loss_of(model, STEPS))
            weights = {name: x.tolist() for name, x in optimizer.eval_params().items()}
            tokens = optimizer.tokens
    return {
        "losses": losses,
        "scales": scales,
        "inside": inside,
        "after": after,
        "no_step": no_step,
        "same": same,
        "weights": weights,
        "tokens": tokens,
    }


def averaged(wrapper, rank=0, count=1):
    """Train with averaged buffers; return them before a round, as of this process, and after it."""
    model = wrapped(wrapper, with_norm)
    norm = model.module[1] if wrapper == "ddp" else model[1]
    found = []
    with local_swarm(1) as swarm:
        door = _LocalDoor(swarm, 0) if rank == 0 else None
        options = {"period": PERIOD, "buffers": "average"}
        with SwarmOptimizer(model, "diloco", door, lr=0.05, **options) as optimizer:
            for step in range(PERIOD):
                loss_of(model, step, rank, count).backward()
                found.append(norm.running_mean.tolist())
                optimizer.step()
                optimizer.zero_grad()
            found.append(norm.running_mean.tolist())
            last = optimizer.last_round.status
    return {"before": found[-2], "after": found[-1], "round": last}


def meddled(wrapper, rank=0, count=1):
    """Add a parameter in the last rank alone; return what the next step says."""
    model = wrapped(wrapper)
    said = []
    with local_swarm(1) as swarm:
        door = _LocalDoor(swarm, 0) if rank == 0 else None
        with SwarmOptimizer(model, "diloco", door, lr=0.05, period=PERIOD) as optimizer:
            loss_of(model, 0, rank, count).backward()
            optimizer.step()
            if rank == count - 1:
                getattr(model, "module", model).more = nn.Linear(1, 1)
            said.append(refusal(optimizer.step))
    return {"said": said}


METHODS = {"diloco": {"period": PERIOD}, "ddp": {}}


def trained(wrapper, method, rank=0, count=1):
    """Return what training without other peers leaves: in all processes, or in this one alone."""
    model = wrapped(wrapper)
    with local_swarm(1) as swarm:
        door = _LocalDoor(swarm, 0) if rank == 0 else None
        refused = [
            refusal(lambda: SwarmOptimizer(model, "diloco", door, perod=3)),
            refusal(lambda: SwarmOptimizer(model, "diloco", door, inner="adamax")),
        ]
        with SwarmOptimizer(model, method, door, lr=0.05, **METHODS[method]) as optimizer:
            refused += [refusal(lambda: copy.copy(optimizer))]
            scaled(model, 0.5)  # the run begins with these weights
            losses = train(model, optimizer, rank, count)
            saved = optimizer.state_dict()
            weights = {name: x.tolist() for name, x in optimizer.eval_params().items()}
            known = facts_of(optimizer)
            optimizer.finish()
        refused += [refusal(optimizer.finish)]
    return {
        "losses": losses,
        "weights": weights,
        "known": known,
        "swarm": bool(saved["swarm"]),
        "refused": refused,
    }


def in_a_swarm(wrapper, invite=None, rank=0, count=1, greet=lambda optimizer: None):
    """Train with another peer over the real network: it founds, or joins by the invite."""
    model = wrapped(wrapper)
    terms = {"period": PERIOD, "codec": "int8", "view_s": 2.0} if invite is None else {}
    method = "diloco" if invite is None else None
    with SwarmOptimizer(model, method, invite, lr=0.05, tokens_per_step=ROWS, **terms) as optimizer:
        greet(optimizer)
        optimizer.wait_for_members(2)
        losses, jump = [], ""
        for step in range(4 * PERIOD):
            loss = loss_of(model, step, rank, count)
            loss.backward()
            if invite is not None and step == 2 * PERIOD + 1:
                factor = 16.0 if rank == count - 1 else 1.0  # in the rows of one process
                scaled(model, factor)
                jump = refusal(optimizer.step)
                scaled(model, 1 / factor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        weights = {name: x.tolist() for name, x in optimizer.eval_params().items()}
        known = facts_of(optimizer)
    return {"losses": losses, "weights": weights, "known": known, "jump": jump}


PARTS = (scaled_steps, averaged, meddled)


def main(wrapper, folder, rank, word):
    """Train; the word is a method, "parts", or the invite of another peer's run."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if word == "parts":
        result = {part.__name__: part(wrapper, rank, 2) for part in PARTS}
    else:
        work = trained if word in METHODS else in_a_swarm
        result = work(wrapper, word, rank, 2)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    me = int(os.environ["RANK"])
    try:
        left = main(sys.argv[1], sys.argv[2], me, sys.argv[3])
    except Exception:
        left = {"error": traceback.format_exc()}
    Path(sys.argv[2], f"{me}.json").write_text(json.dumps(left))
