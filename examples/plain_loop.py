"""A plain PyTorch loop with a swarm under it: guess the next byte of Shakespeare from the eight before it.

`python examples/plain_loop.py` founds a run and prints an invite; `python examples/plain_loop.py INVITE`, in another
terminal, joins. Both train on batches of their own and end with the same weights.
"""

import hashlib
import sys

import torch
from torch import nn

import farflock
from farflock.node.model.corpus import load_corpus

STEPS, PERIOD, PEERS, CONTEXT = 60, 10, 2, 8

text = torch.frombuffer(
    bytearray(load_corpus("shakespeare").train, "utf-8"), dtype=torch.uint8
).long()
chance = torch.Generator()
chance.seed()
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(CONTEXT * 32, 128),
    nn.ReLU(),
    nn.Linear(128, 256),
)
invite = sys.argv[1] if len(sys.argv) > 1 else None

with farflock.SwarmOptimizer(
    model, "diloco", invite, inner="adamw", lr=3e-3, period=PERIOD, codec="int8"
) as optimizer:
    if invite is None:
        print("join with: python examples/plain_loop.py", optimizer.invite, flush=True)
    optimizer.wait_for_members(PEERS)
    for step in range(1, STEPS + 1):
        places = torch.randint(len(text) - CONTEXT, (64,), generator=chance)
        x, y = (
            torch.stack([text[place : place + CONTEXT] for place in places]),
            text[places + CONTEXT],
        )
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % PERIOD == 0:
            print(f"step {step}: loss {loss:.3f}, {optimizer.last_round}", flush=True)

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights:", hashlib.sha256(weights).hexdigest())
