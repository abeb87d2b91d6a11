"""`farflock sim` for a manifest with a pipeline.

The peers are full replicas, if any are asked for, then servers of all stages in turn and a trainer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.output import Output

if TYPE_CHECKING:
    from pathlib import Path

    from farflock.node.model.device import Device
    from farflock.node.model.weights_folder import WeightsFolder
    from farflock.node.pipeline.lifecycle.assembly import StageNode
    from farflock.node.pipeline.node import PipelineNode
    from farflock.node.run.manifest import Manifest
    from farflock.node.simulate.pipeline import PipelineWorld
    from farflock.node.tokens.tokenizer import TokenIds
    from farflock.swarm.sim.network import LinkModel

EVALUATED = 128  # held-out sequences
PASSES = 4  # of a step: a forward pass, its recomputation, gradients of inputs and of weights


def world_of(
    described: "Manifest",
    peers: int,
    link: "LinkModel",
    step_s: float,
    churn_s: float | None,
    replicas: int = 0,
) -> "PipelineWorld":
    """Return the simulated surroundings.

    `step_s` is the time of one microbatch, through all stages and back. `replicas` of the peers are
    full replicas, each as fast as a server; with replicas, stages may have no servers and there may
    be no trainer.
    """
    from farflock.node.simulate.pipeline import PeerRole, PipelineWorld
    from farflock.swarm.roles import EVERY

    pipeline = described.pipeline_plan()
    assert pipeline is not None, "the manifest has no [pipeline]"
    stages = len(pipeline.stages)
    others = peers - replicas
    if others < 0:
        raise click.UsageError(
            f"--replicas {replicas} is more than --peers {peers}; lower it, or take more peers"
        )
    if not replicas and peers <= stages:
        raise click.UsageError(
            f"--peers {peers} leaves a stage without a server;"
            f" {stages} stages and a trainer need {stages + 1} or more"
        )
    forward_s = step_s / (PASSES * stages)
    whole = [PeerRole(EVERY, trains=True, forward_s=forward_s)] * replicas
    servers = [PeerRole(number % stages, forward_s=forward_s) for number in range(others - 1)]
    parts = (*whole, *servers, *([PeerRole(trains=True)] if others else []))
    limit_s = (
        100 * step_s * described.run.total_tokens / (described.train.batch * described.train.seq)
        + 3600
    )
    return PipelineWorld(
        parts,
        described.run.total_tokens,
        link,
        churn_s,
        view_s=described.exchange.view_s,
        limit_s=limit_s,
    )


def simulate(
    out: Output,
    described: "Manifest",
    world: "PipelineWorld",
    device: "Device",
    weights: "WeightsFolder | None",
    data: "Sequence[Path]",
) -> None:
    """Run the simulation, with all stages on one device, and measure the result on the held-out
    text. Only the founder has the `weights` that the run starts from, if any."""
    import torch

    from farflock.node.assembly.text import text_of
    from farflock.node.simulate.pipeline import EventLog, PipelineSimulation
    from farflock.swarm.sim.virtual_time import run_virtual

    torch.set_num_threads(1)
    pipeline, text = described.pipeline_plan(), text_of(described.data, data)
    assert pipeline is not None, "the manifest has no [pipeline]"
    parts = tuple(replace(part, device=device) for part in world.parts)
    placed = replace(world, parts=parts)

    async def main() -> "tuple[EventLog, dict[int, PipelineNode]]":
        simulation = PipelineSimulation(
            described.plan(), pipeline, placed, text.train(), weights=weights
        )
        return await simulation.run(), simulation.nodes

    with out.progress("simulating"):
        tale, nodes = run_virtual(main())
    losses = [float(str(fields["loss"])) for fields in tale.fields("loss")]
    tenth = max(len(losses) // 10, 1)
    facts: dict[str, Any] = {
        **_measured(described, nodes, text.held_out(), device),
        "rounds": len(
            {(str(fields["stream"]), fields["round"]) for fields in tale.fields("round")}
        ),
        "losses": [
            round(sum(losses[at : at + tenth]) / tenth, 4) for at in range(0, tenth * 10, tenth)
        ],
        "microbatches": len(tale.fields("microbatch")),
        "bytes": tale.sent_bytes,
        "virtual_s": tale.virtual_s,
        "kills": tale.kills,
    }
    out.result(facts, "\n".join(f"{name}: {value}" for name, value in facts.items()))


def _measured(
    described: "Manifest",
    nodes: "dict[int, PipelineNode]",
    held_out: "TokenIds",
    device: "Device",
) -> dict[str, Any]:
    """Return the hash and the held-out loss of the model, assembled from the server of each
    stage that is furthest ahead."""
    import torch

    from farflock.node.errors import Failure
    from farflock.node.model.data import evaluation
    from farflock.node.model.evaluation import losses, summarise
    from farflock.node.model.llama import build
    from farflock.optimizers.parts.state import state_hash

    plan = described.plan()
    furthest: dict[int, StageNode] = {}
    for serving in (serving for node in nodes.values() for serving in node.servings):
        before = furthest.get(serving.index)
        if before is None or serving.state_sync.applied_round > before.state_sync.applied_round:
            furthest[serving.index] = serving
    model, digest = build(plan.model, plan.run_seed).to(device.place), hashlib.sha256()
    state: dict[str, torch.Tensor] = {}
    for _, serving in sorted(furthest.items()):
        driver = serving.loop.driver
        digest.update(state_hash(driver.method.snapshot(driver.replica)))
        state |= dict(driver.method.eval_params(driver.replica))
    if missing := [name for name, _ in model.named_parameters() if name not in state]:
        why = f"no server of the stage with {missing[0]} is left"
        raise Failure("the model cannot be evaluated", why, "take more --peers, or less --churn")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    measured = summarise(losses(model, *evaluation(held_out, plan.seq, EVALUATED)))
    return {
        "state_hash": digest.hexdigest(),
        "held_out_loss": measured.mean,
        "held_out_standard_error": measured.standard_error,
    }
