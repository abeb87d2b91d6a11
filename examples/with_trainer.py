"""Hugging Face's Trainer on a swarm: it takes the optimizer, and logs what the swarm measures.

`python -m farflock.examples.with_trainer` starts a run and prints an invite; in another terminal,
the same line with INVITE joins. It needs `pip install transformers accelerate`.
"""

import os
import sys

import torch
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import farflock

STEPS, PERIOD, PEERS = int(os.environ.get("STEPS", "60")), 5, 2
BATCH, CONTEXT, VOCABULARY = 8, 32, 64


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a random number, other ones in each process."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = (torch.randint(VOCABULARY, (1,)) + torch.arange(CONTEXT)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes))
invite = sys.argv[1] if len(sys.argv) > 1 else None
method = farflock.DiLoCo(period=PERIOD, codec="int8")

with farflock.SwarmOptimizer(
    model, method, invite, lr=3e-3, tokens_per_step=BATCH * CONTEXT
) as optimizer:
    if invite is None:
        print("join with: python", sys.argv[0], optimizer.invite, flush=True)
    optimizer.wait_for_members(PEERS)
    warmup = farflock.scheduled(optimizer, LinearLR(optimizer, 0.1, total_iters=PERIOD))
    options = TrainingArguments(
        "build/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=PERIOD,
        save_strategy="no",
        report_to="none",
        seed=int.from_bytes(os.urandom(4)),  # or all processes would draw the same numbers
    )
    trainer = Trainer(model, options, train_dataset=Counting(), optimizers=(optimizer, warmup))
    optimizer.log_to(trainer)
    trainer.train()
    optimizer.finish()
    print(optimizer.status())
print("weights:", sum(entry.double().sum().item() for entry in model.parameters()))
