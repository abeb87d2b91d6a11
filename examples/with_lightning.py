"""Lightning on a swarm: `configure_optimizers` returns the optimizer, all else stays.

`python -m farflock.examples.with_lightning` starts a run and prints an invite; in another terminal,
the same line with INVITE joins. It needs `pip install lightning`.
"""

import os
import sys

import lightning
import torch
from torch import nn

import farflock

STEPS, PERIOD, PEERS, BATCH = int(os.environ.get("STEPS", "60")), 5, 2, 32


class Sums(lightning.LightningModule):
    """Learns the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.swarm: farflock.SwarmOptimizer | None = None

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a batch [BATCH, 8]."""
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the swarm."""
        assert self.swarm is not None
        return self.swarm


module = Sums()
invite = sys.argv[1] if len(sys.argv) > 1 else None
method = farflock.DiLoCo(period=PERIOD, codec="int8")
data = torch.randn(STEPS, BATCH, 8)

with farflock.SwarmOptimizer(
    module, method, invite, lr=3e-3, tokens_per_step=BATCH
) as module.swarm:
    if invite is None:
        print("join with: python", sys.argv[0], module.swarm.invite, flush=True)
    module.swarm.wait_for_members(PEERS)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    module.swarm.finish()
    print(module.swarm.status())
print("weights:", sum(entry.double().sum().item() for entry in module.parameters()))
