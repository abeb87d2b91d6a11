"""A demo's results: held-out losses of the swarm and its two baselines, bytes, a plot, a
checkpoint, and sample text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflock.node.assembly.text import corpus_text
from farflock.node.data.samples import Text
from farflock.node.demo.baselines import Comparison, compare, train_baseline
from farflock.node.demo.demo import Child, Mark
from farflock.node.demo.plot import plot
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import losses, unigram_loss
from farflock.node.model.generate import generate
from farflock.node.model.llama import Llama, build
from farflock.node.run.terms import RunPlan
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer

HELD_OUT_SEQUENCES = 400
SAMPLE_TOKENS = 200


def report(
    plan: RunPlan,
    lines: RunPlan,
    folder: Path,
    children: Sequence[Child],
    marks: Sequence[Mark],
    peers: int,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Train the baselines as `lines` says (some methods' inner optimizers are of no use without
    the method), evaluate everything, and write the plot and the checkpoint. Return the fields of
    the demo's result. Peers that never joined are ignored."""
    children = [child for child in children if child.status() is not None]
    train = train_text()
    streams = [status.peer for child in children if (status := child.status()) is not None][:peers]
    steps = plan.schedule.total_tokens // (peers * plan.batch * plan.seq * plan.accumulate)
    swarm = _swarm_model(plan, children)
    ddp = train_baseline(lines, train, streams, peers, steps, lambda share: progress("DDP", share))
    none = train_baseline(
        lines, train, streams[:1], peers, steps, lambda share: progress("no communication", share)
    )
    return held_against(plan, folder, children, marks, (swarm, ddp, none), peers, steps)


def train_text() -> Text:
    """Return the text that a demo trains on."""
    return corpus_text(load_corpus(SHIPPED), ByteTokenizer()).train()


def held_against(
    plan: RunPlan,
    folder: Path,
    children: Sequence[Child],
    marks: Sequence[Mark],
    models: tuple[Llama, Llama, Llama],
    peers: int,
    steps: int,
) -> dict[str, Any]:
    """Evaluate the swarm's model and its two baselines; write the plot and the checkpoint.
    Return the fields that both demos have."""
    tokenizer, corpus = ByteTokenizer(), load_corpus(SHIPPED)
    train, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    x, y = evaluation(held_out, plan.seq, HELD_OUT_SEQUENCES)
    swarm, ddp, none = models
    trained = [child for child in children if child.status() is not None]
    compared = compare(losses(swarm, x, y), losses(ddp, x, y), losses(none, x, y))
    return {
        **_numbers(compared),
        "untrained_loss": float(losses(build(plan.model, plan.run_seed), x, y).mean()),
        "unigram_loss": unigram_loss(train, held_out, tokenizer.vocab_size),
        "bytes_per_peer": _bytes_per_peer(children),
        "ddp_bytes_per_peer": _ddp_bytes(swarm, peers, steps),
        "tokens": plan.schedule.total_tokens,
        "checkpoint": str(_save(plan, folder, swarm, compared)),
        "plot": str(plot(folder, trained, marks, plan.schedule.total_tokens, compared)),
        "sample": generate(swarm, tokenizer, "ROMEO", SAMPLE_TOKENS, seed=plan.run_seed),
    }


def _ddp_bytes(model: Llama, peers: int, steps: int) -> int:
    """Return the bytes per peer of a ring all-reduce of bf16 gradients at every step."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return int(2 * (peers - 1) / peers * parameters * 2 * steps)


def _numbers(compared: Comparison) -> dict[str, float | None]:
    return {
        "held_out_loss": compared.swarm,
        "held_out_error": compared.swarm_error,
        "ddp_loss": compared.ddp,
        "ddp_error": compared.ddp_error,
        "none_loss": compared.none,
        "none_error": compared.none_error,
        "gain": compared.gain,
        "gain_error": compared.gain_error,
        "share_of_gain": compared.share_of_gain,
    }


def mean_of(states: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of models with equal names and shapes."""
    return {name: torch.stack([each[name] for each in states]).mean(dim=0) for name in states[0]}


def _swarm_model(plan: RunPlan, children: Sequence[Child]) -> Llama:
    """Return the mean of the survivors' models as evaluated (for an exact method they are
    equal)."""
    mean = mean_of([checkpoint.load(found).groups["model"] for found in _checkpoints(children)])
    model = build(plan.model, plan.run_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mean[name])
    return model


def _checkpoints(children: Sequence[Child]) -> list[Path]:
    found = [
        checkpoint.latest(child.folder / "checkpoints") for child in children if not child.killed
    ]
    return [entry.folder for entry in found if entry is not None]


def _bytes_per_peer(children: Sequence[Child]) -> int:
    sent = [
        status.sent_bytes
        for child in children
        if (status := child.status()) is not None and not child.killed
    ]
    return int(sum(sent) / max(len(sent), 1))


def _save(plan: RunPlan, folder: Path, model: Llama, compared: Comparison) -> Path:
    import msgspec

    weights: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    steps = plan.schedule.total_tokens // (plan.batch * plan.seq)
    files = {"config.json": msgspec.json.encode(plan.model)}
    meta = {"held_out_loss": compared.swarm, "tokens": plan.schedule.total_tokens}
    return checkpoint.save(folder / "checkpoints", steps, {"model": weights}, meta, files)
