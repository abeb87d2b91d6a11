"""Several processes as one peer: a model in shards (FSDP2) under torchrun, in a swarm.

`torchrun --nproc-per-node 2 -m farflock.examples.with_torchrun` starts a run and prints an invite;
on another machine, the same line with INVITE joins, with as many processes as that machine likes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import farflock

STEPS, PERIOD, PEERS, BATCH = int(os.environ.get("STEPS", "60")), 5, 2, 32

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
for layer in model:
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh(device.type, (ranks,)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device.type, (ranks,)))
chance = torch.Generator()
chance.seed()  # other data in each process
invite = sys.argv[1] if len(sys.argv) > 1 else None
method = farflock.DiLoCo(period=PERIOD, codec="int8")

with farflock.SwarmOptimizer(
    model, method, invite, lr=3e-3, tokens_per_step=BATCH * ranks
) as optimizer:
    if invite is None and rank == 0:
        print("join with: torchrun", sys.argv[0], optimizer.invite, flush=True)
    optimizer.wait_for_members(PEERS)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 8, generator=chance).to(device)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.finish()
    print(f"rank {rank}: loss {loss:.3f}; {optimizer.status()}")
whole = [entry.full_tensor() for entry in model.parameters()]  # type: ignore[attr-defined]
if rank == 0:
    print("weights:", sum(entry.double().sum().item() for entry in whole))
dist.destroy_process_group()
