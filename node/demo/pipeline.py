"""The demo of a pipeline: six processes, three stages with two servers each, none of which holds
the whole model.

One server is killed, then both servers of the middle stage at once; a newcomer rebuilds that stage
from the stages before and after it, and training goes on. The result is compared with the unsplit
model, trained on exactly the same microbatches.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflock.node.assembly.checkpoints import folder_of
from farflock.node.demo.baselines import train_baseline
from farflock.node.demo.demo import Child, Demo, Mark
from farflock.node.demo.report import held_against, mean_of, train_text
from farflock.node.errors import Failure
from farflock.node.model.llama import Llama, build
from farflock.node.model.stage_tensors import joined
from farflock.node.run.manifest import Manifest, demo_options, resolve
from farflock.node.run.terms import RunPlan
from farflock.node.state import checkpoint
from farflock.node.state.paths import RunFolder
from farflock.optimizers.catalog import NAMES, options_of
from farflock.swarm.roles import role_of

METHOD = "ddp"
DEADLINE_S = 10.0  # servers pass batches on beside their rounds
STAGES, SERVERS = 3, 2
MIDDLE = 1
KILL_ONE_AT, KILL_STAGE_AT, LATE_AT = 0.25, 0.45, 0.55


def pipeline_manifest(steps: int, method: str = METHOD) -> Manifest:
    """Return the manifest of `farflock demo --pipeline`; equal stages can replace each other. Raise
    `Usage` for a method that does not run inside pipelines."""
    # DDP's rate follows the run alone, and so do the baselines'
    train = {"batch": 4, "seq": 64, "joiner_steps": 0}
    batch, options = 8, demo_options(method, steps)
    if "deadline_s" in options:
        options["deadline_s"] = DEADLINE_S
    if method in NAMES and "fragments" in options_of(method):
        options["fragments"] = 1  # each stage has one layer
    return resolve(
        {
            "run": {
                "name": "pipeline demo",
                "seed": 1,
                "total_tokens": steps * batch * train["batch"] * train["seq"],
            },
            "model": {
                "dim": 96,
                "layers": STAGES,
                "heads": 4,
                "kv_heads": 4,
                "ffn_dim": 256,
                "context": 128,
                "tied": False,
            },
            "train": train,
            "pipeline": {"stages": STAGES, "batch": batch},
            "method": {"name": method, "options": options},
            "exchange": {"view_s": 2.0, "start_peers": STAGES * SERVERS},
            "evaluation": {"sequences": 64},
        }
    )


@dataclass(slots=True)
class PipelineDemo(Demo):
    """A demo whose founder serves the first stage and trains; each other peer serves one stage."""

    def others(self) -> list[tuple[str, list[str]]]:
        stages = [stage for _ in range(SERVERS) for stage in range(STAGES)][1:]
        names = [
            f"server {stage}{'b' if place >= STAGES - 1 else ''}"
            for place, stage in enumerate(stages)
        ]
        return [
            (name, ["--role", role_of(stage)]) for name, stage in zip(names, stages, strict=True)
        ]

    def let_happen(self, share: float, invite: str) -> None:
        """Kill one server, then a whole stage, which a newcomer takes over; then add another
        newcomer."""
        if share >= KILL_ONE_AT and not self.killed:
            self._kill(self._of("server 2b"), share)
        if share >= KILL_STAGE_AT and self.killed == 1:
            for name in (f"server {MIDDLE}", f"server {MIDDLE}b"):
                self._kill(self._of(name), share)
            self.start("newcomer", ["join", invite])
            news = f"stage {MIDDLE} has no server left; a newcomer joins by invite"
            self._tell(share, "newcomer invited", news)
        if share >= LATE_AT and len(self.newcomers()) == 1:
            self.start("newcomer b", ["join", invite])
            self.joined_s = time.monotonic()
            self._tell(share, "newcomer b invited", "another newcomer joins by invite")

    def _of(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)


def report(
    manifest: Manifest,
    folder: Path,
    children: Sequence[Child],
    marks: Sequence[Mark],
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Assemble the model from the stages' last checkpoints. Train the unsplit model on the
    founder's microbatches, and another model on one server's share; evaluate all of them. Return
    the fields of the demo's result."""
    plan, pipeline = manifest.plan(), manifest.pipeline_plan()
    assert pipeline is not None, "a demo of a pipeline"
    microbatches = pipeline.batch_tokens // (plan.batch * plan.seq)
    steps, servers = plan.schedule.total_tokens // pipeline.batch_tokens, STAGES * SERVERS
    founder = children[0].status()
    assert founder is not None, "the founder ended well"
    lines, streams, train = replace(plan, accumulate=microbatches), [founder.peer], train_text()
    whole = assembled(plan, len(pipeline.stages), children)
    unsplit = train_baseline(
        lines, train, streams, 1, steps, lambda share: progress("unsplit", share)
    )
    alone = train_baseline(
        lines, train, streams, servers, steps // servers, lambda share: progress("alone", share)
    )
    facts = held_against(plan, folder, children, marks, (whole, unsplit, alone), servers, steps)
    return facts | {
        "unsplit_loss": facts["ddp_loss"],
        "microbatches": founder.work["microbatches"],
        "microbatches_lost": founder.work["in doubt"],
        "microbatches_doubled": founder.work["doubled"],
    }


def assembled(plan: RunPlan, stages: int, children: Sequence[Child]) -> Llama:
    """Return the whole model from the mean of each stage's servers that came to the run's end (an
    exact method left them equal), or else from its newest checkpoint; raise `Failure` without
    one."""
    pieces: list[dict[str, Tensor]] = []
    for stage in range(stages):
        folders = (
            folder_of(RunFolder(child.folder), role_of(stage))
            for child in children
            if not child.killed
        )
        found = [saved for folder in folders if (saved := checkpoint.latest(folder)) is not None]
        if not found:
            raise Failure(
                f"stage {stage} left no checkpoint",
                "none of its servers ended well",
                "read their log.txt",
            )
        found.sort(key=lambda saved: int(saved.meta["tokens"]))
        ended = [one for one in found if int(one.meta["tokens"]) >= plan.schedule.total_tokens]
        pieces.append(mean_of([saved.groups["model"] for saved in ended or found[-1:]]))
    model = build(plan.model, plan.run_seed)
    with torch.no_grad():
        for name, x in joined(pieces).items():
            model.get_parameter(name).copy_(x)
    return model
