"""Images, convolutions and BatchNorm: two peers learn which way stripes run, each on its own noise.

`python -m farflock.examples.vision` runs both in this process. Parameters are averaged; the
statistics of BatchNorm are buffers, which stay each peer's own, so they are measured again at the
end, on the weights that the peers then share.
"""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import farflock
from farflock.node.library.local_swarm import Optimize

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
SIDE, BATCH, PIXELS = 16, 32, torch.arange(16) // 2 % 2 * 2.0 - 1


def images(chance: torch.Generator, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images [count, 1, SIDE, SIDE] and their classes: 0 for rows, 1 for columns."""
    y = torch.randint(2, (count,), generator=chance)
    rows = PIXELS.repeat(SIDE, 1).T
    x = torch.where(y[:, None, None] == 0, rows, rows.T)
    return (x + torch.randn(x.shape, generator=chance))[:, None], y


def net() -> nn.Sequential:
    """Return a small convolutional network."""
    first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def work(rank: int, optimize: Optimize) -> float:
    """Train; return the share of new images whose class is found."""
    model, chance = net().to(memory_format=torch.channels_last), torch.Generator()  # type: ignore[call-overload]
    chance.manual_seed(rank)
    with optimize(model, lr=1e-2, tokens_per_step=BATCH) as optimizer:
        for _ in range(STEPS):
            x, y = images(chance)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.finish()  # from here on all peers have the same weights
        print(f"rank {rank}: {optimizer.status()}")
    update_bn((images(chance)[0] for _ in range(10)), model)
    model.eval()
    x, y = images(torch.Generator().manual_seed(99), 512)
    return float((model(x).argmax(1) == y).float().mean())


with farflock.local_swarm(2, farflock.DiLoCo(period=5, codec="int8"), view_s=1.0) as swarm:
    print("found:", *(f"{share:.3f}" for share in swarm.train(work)))
