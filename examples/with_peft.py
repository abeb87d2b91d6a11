"""LoRA on a swarm: peers fine-tune the adapters of one frozen model, and only those travel.

`python -m farflock.examples.with_peft` starts a run and prints an invite; in another terminal, the
same line with INVITE joins. It needs `pip install peft`. The base must be the same in each process:
here it comes from a seed, in your program from `from_pretrained`.
"""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import farflock

STEPS, PERIOD, PEERS = int(os.environ.get("STEPS", "60")), 5, 2
BATCH, CONTEXT, VOCABULARY = 8, 32, 64

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
model.print_trainable_parameters()
chance = torch.Generator()
chance.seed()  # other data in each process
invite = sys.argv[1] if len(sys.argv) > 1 else None
method = farflock.DiLoCo(period=PERIOD, codec="int8")

with farflock.SwarmOptimizer(
    model, method, invite, lr=1e-2, tokens_per_step=BATCH * CONTEXT
) as optimizer:
    if invite is None:
        print("join with: python", sys.argv[0], optimizer.invite, flush=True)
    optimizer.wait_for_members(PEERS)
    for _ in range(STEPS):
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=chance)
        ids = (starts + torch.arange(CONTEXT)) % VOCABULARY
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.finish()
    print(f"loss {loss:.3f}; {optimizer.status()}")
model.save_pretrained("build/adapter")
print("weights:", sum(entry.double().sum().item() for entry in model.parameters()))
