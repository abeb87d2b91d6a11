"""A plain PyTorch loop with a swarm under it: predict the next byte of Shakespeare from eight.

`python -m farflock.examples.plain_loop` starts a run and prints an invite. In another terminal, the
same line with INVITE joins. Each trains on its own batches, and both end with the same weights.
"""

import hashlib
import sys

import torch
from torch import nn

import farflock
from farflock.node.model.corpus import load_corpus

STEPS, PERIOD, PEERS, CONTEXT = 60, 10, 2, 8

text = torch.tensor(list(load_corpus("shakespeare").train.encode()))
chance = torch.Generator()
chance.seed()
reader = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 128))
model = nn.Sequential(reader, nn.ReLU(), nn.Linear(128, 256))
invite = sys.argv[1] if len(sys.argv) > 1 else None

with farflock.SwarmOptimizer(
    model, "diloco", invite, lr=3e-3, period=PERIOD, codec="int8"
) as optimizer:
    if invite is None:
        print("join with: python", sys.argv[0], optimizer.invite, flush=True)
    optimizer.wait_for_members(PEERS)
    for step in range(1, STEPS + 1):
        places = torch.randint(len(text) - CONTEXT, (64,), generator=chance)
        x = torch.stack([text[place : place + CONTEXT] for place in places])
        loss = nn.functional.cross_entropy(model(x), text[places + CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % PERIOD == 0:
            print(f"step {step}: loss {loss:.3f}, {optimizer.last_round}", flush=True)

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights:", hashlib.sha256(weights).hexdigest())
