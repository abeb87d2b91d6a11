"""accelerate on a swarm: gradients of several batches, then one step of the swarm's optimizer.

`python -m farflock.examples.with_accelerate` starts a run and prints an invite; in another
terminal, the same line with INVITE joins. It needs `pip install accelerate`.
"""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

import farflock

STEPS, PERIOD, PEERS, BATCH, BATCHES = int(os.environ.get("STEPS", "60")), 5, 2, 32, 2

accelerator = Accelerator(gradient_accumulation_steps=BATCHES)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(accelerator.device)
invite = sys.argv[1] if len(sys.argv) > 1 else None
method = farflock.DiLoCo(period=PERIOD, codec="int8")
numbers = torch.randn(STEPS * BATCHES * BATCH, 8)

with farflock.SwarmOptimizer(
    net, method, invite, lr=3e-3, tokens_per_step=BATCHES * BATCH
) as swarm:
    if invite is None:
        print("join with: python", sys.argv[0], swarm.invite, flush=True)
    swarm.wait_for_members(PEERS)
    model, optimizer, loader = accelerator.prepare(
        net,
        swarm,
        torch.utils.data.DataLoader(numbers, batch_size=BATCH),  # type: ignore[arg-type]
    )
    for x in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    swarm.finish()
    print(f"loss {loss:.3f}; {swarm.status()}")
print("weights:", sum(entry.double().sum().item() for entry in net.parameters()))
