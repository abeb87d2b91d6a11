"""The baselines, each in one process.

Exact data parallelism is one model on the whole batch of each step; no communication is one model
on one peer's part of it. The model, batches, schedule and inner optimizer are the swarm's; only the
communication between replicas is missing.
"""

import math
from collections.abc import Callable

from farflock.experiments.pipelines.text import texts
from farflock.experiments.reproduce.job import RUN, Diverged, Line, Outcome, Point
from farflock.experiments.reproduce.share import Share
from farflock.experiments.reproduce.text import comparable, measure
from farflock.node.assembly.node import task_of
from farflock.node.model.llama import build
from farflock.node.model.step_options import StepOptions
from farflock.optimizers.method import Progress


def run(job: Line, progress: Callable[[float], None]) -> Outcome:
    """Train the baseline; raise `Diverged` when its loss is no longer finite."""
    plan = job.plan("local", {}, job.batch)
    device = comparable(job.device)
    model = build(plan.model, plan.run_seed).to(device.place)
    batches = Share(texts()[0], job.seed, RUN, job.batch, job.seq)
    training_task = task_of(plan, model, batches, device, StepOptions(compile="off"))
    replica = training_task.replica
    loss_of = measure(job.model, job.seed, job.seq, job.held_out, device.place)
    curve: list[Point] = []
    for step in range(job.steps):
        tokens = step * training_task.tokens_per_step
        if not math.isfinite(float(training_task.forward_backward(step, Progress(step, tokens)))):
            raise Diverged(f"at step {step}")
        replica.inner_step()
        if (step + 1) * job.points // job.steps > step * job.points // job.steps:
            loss = loss_of(replica.read(replica.names, "param"))
            tokens += training_task.tokens_per_step
            curve.append(
                Point(tokens=tokens, sent_bytes=0, compute_s=0, loss=loss, lr=replica.lr or 0.0)
            )
        progress((step + 1) / job.steps)
    last = curve[-1]
    return Outcome(
        metrics={
            "loss": last.loss,
            "perplexity": math.exp(last.loss),
            "tokens": last.tokens,
            "bytes": 0,
            "spread": 0,
        },
        curve=curve,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
