"""`farflock sim`: a run on a simulated network in virtual time, or small swarms under faults."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands import sim_chaos
from farflock.node.cli.commands.options import data_option, device_option
from farflock.node.cli.output import Output, one_line

if TYPE_CHECKING:
    from farflock.node.model.device import Device
    from farflock.node.model.weights_folder import WeightsFolder
    from farflock.node.run.manifest import Manifest
    from farflock.node.simulate.pipeline import PipelineWorld
    from farflock.node.simulate.simulation import World
    from farflock.swarm.sim.network import LinkModel

EVALUATED = 128  # held-out sequences


@click.command("sim")
@click.argument(
    "manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="A.B=C",
    help="Change one value of the manifest, as in train.lr=0.01.",
)
@click.option(
    "--peers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Number of peers.",
)
@click.option(
    "--replicas",
    type=click.IntRange(0),
    default=0,
    help="With a [pipeline]: how many of the peers hold the whole model.",
)
@click.option(
    "--loss",
    type=click.FloatRange(0, 0.9),
    default=0.0,
    show_default=True,
    help="Share of frames that the network loses.",
)
@click.option(
    "--churn",
    type=click.FloatRange(0.1),
    help="Mean seconds between two kills; a killed peer comes back.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.01),
    default=100.0,
    show_default=True,
    help="Bandwidth of each peer in Mbit/s, each way.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="Latency of each peer's line in ms, one way; a frame crosses two lines.",
)
@click.option(
    "--step",
    "step_s",
    type=click.FloatRange(0.001),
    default=0.5,
    show_default=True,
    help="Seconds that a training step takes.",
)
@click.option(
    "--lost",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of records that the directory (DHT) loses.",
)
@click.option(
    "--stale",
    type=click.FloatRange(0),
    default=0.0,
    help="Seconds by which the directory (DHT) may be out of date.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Save the simulation here, and resume from it.",
)
@click.option(
    "--leg",
    "leg_tokens",
    type=click.IntRange(1),
    help="With --folder: tokens between two saves.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Run small swarms through seeded disasters; each violation is reported as a seed.",
)
@click.option(
    "--pipeline", is_flag=True, help="With --chaos: pipelines instead of swarms of whole replicas."
)
@click.option(
    "--returns",
    is_flag=True,
    help="With --chaos: all members end and come back with their folders.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="With --chaos: number of seeds.",
)
@click.option(
    "--first-seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With --chaos: the first seed.",
)
@data_option
@click.option("--method", "name", help="With --chaos: only this method (default: all in turn).")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="With --chaos: parallel processes (default: one per core).",
)
@device_option("cpu", "; the same seed gives the same state hash on the same kind of device")
@click.option("--dry-run", is_flag=True, help="Print what would run and its hash; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    manifest: Path | None,
    assignments: tuple[str, ...],
    peers: int,
    replicas: int,
    loss: float,
    churn: float | None,
    rate: float,
    latency: float,
    step_s: float,
    lost: float,
    stale: float,
    folder: Path | None,
    leg_tokens: int | None,
    chaos: bool,
    pipeline: bool,
    returns: bool,
    seeds: int,
    first_seed: int,
    data: tuple[Path, ...],
    name: str | None,
    workers: int | None,
    device: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run MANIFEST with real training steps on a simulated network, in virtual time.

    Without MANIFEST, a tiny model is trained. The same seed gives the same state hash. Peers do not
    evaluate the run as it goes on, whatever [evaluation] says: the end of it is measured instead.

    \b
    Examples:
      farflock sim --set method.name=diloco --peers 8
      farflock sim plays.toml --rate 10 --latency 80 --churn 60
      farflock sim --chaos --seeds 50
    """
    out = Output(as_json)
    _require_folder(folder, leg_tokens)
    kind = _kind(chaos, pipeline, returns)
    _require_one_kind(chaos, bool(manifest or assignments), name, device)
    if chaos:
        sim_chaos.run(out, kind, range(first_seed, first_seed + seeds), workers, name, dry_run)
        return
    from farflock.node.model.device import choose
    from farflock.node.run.fit import require_members
    from farflock.node.run.manifest import load, simulated_default
    from farflock.optimizers.catalog import method

    if manifest:
        described = load(manifest, assignments, data)
    else:
        described = simulated_default(assignments, data)
    place, link = choose(device), _link(rate, latency, loss)
    if described.pipeline is not None:
        from farflock.node.cli.commands import sim_pipeline

        staged = sim_pipeline.world_of(described, peers, link, step_s, churn, replicas)
        if not _dry(out, described, staged, dry_run):
            weights = _weights(described, manifest, assignments)
            sim_pipeline.simulate(out, described, staged, place, weights, data)
        return
    _require_no_replicas(replicas)
    plan = described.plan()
    require_members(method(plan.method, **plan.options), peers, "--peers")
    world = _world(described, peers, link, step_s, churn, (stale, lost), leg_tokens)
    if not _dry(out, described, world, dry_run):
        weights = _weights(described, manifest, assignments)
        _simulate(out, described, world, folder, place, weights, data)


def _require_folder(folder: Path | None, leg_tokens: int | None) -> None:
    if leg_tokens and not folder:
        raise click.UsageError(
            "--leg saves the simulation at intervals and needs a --folder to save it in"
        )


def _kind(chaos: bool, pipeline: bool, returns: bool) -> str:
    """Return the option that names a kind of disasters; refuse one without --chaos, and two."""
    named = [
        option for option, is_set in (("--pipeline", pipeline), ("--returns", returns)) if is_set
    ]
    if pipeline and not chaos:
        raise click.UsageError(
            "--pipeline is for --chaos; a run is a pipeline if its manifest has a [pipeline] table"
        )
    if named and not chaos:
        raise click.UsageError("--returns is for --chaos")
    if len(named) > 1:
        raise click.UsageError("--pipeline and --returns are two kinds of disasters; choose one")
    return named[0] if named else ""


def _require_one_kind(chaos: bool, described: bool, method: str | None, device: str) -> None:
    """Refuse options for disasters together with options for a single run."""
    if chaos and described:
        raise click.UsageError("--chaos makes its own manifests; leave out the manifest and --set")
    if chaos and device != "cpu":
        raise click.UsageError(f"--chaos runs on the CPU; leave out --device {device[:64]}")
    if method and not chaos:
        raise click.UsageError("--method is for --chaos; for one run, write --set method.name=NAME")


def _require_no_replicas(replicas: int) -> None:
    if replicas:
        raise click.UsageError(
            "--replicas needs a [pipeline] table in the manifest; else all peers are replicas"
        )


def _weights(
    described: "Manifest", path: Path | None, assignments: tuple[str, ...]
) -> "WeightsFolder | None":
    """Return what the simulated founder's model begins with; None if the seed gives it."""
    from farflock.node.run.manifest import model_folder
    from farflock.node.run.model_section import first_weights

    return first_weights(described.plan(), model_folder(path, assignments))


def _link(rate: float, latency: float, loss: float) -> "LinkModel":
    """Return the model of each line, from Mbit/s, ms one way and the share of frames lost."""
    from farflock.swarm.sim.network import LinkModel

    line_loss = 1 - (1 - loss) ** 0.5  # a frame crosses two lines
    return LinkModel(rate * 125_000, rate * 125_000, latency / 1000, latency / 4000, line_loss)


def _world(
    described: "Manifest",
    peers: int,
    link: "LinkModel",
    step_s: float,
    churn_s: float | None,
    faults: tuple[float, float],
    leg_tokens: int | None,
) -> "World":
    """Return the simulated surroundings; `faults` are the directory's, its seconds out of date and
    the share of records that it loses."""
    from farflock.node.simulate.simulation import World
    from farflock.swarm.sim.directory import DirectoryFaults

    return World(
        peers,
        described.run.total_tokens,
        link,
        step_s,
        churn_s=churn_s,
        view_s=described.exchange.view_s,
        branch_after_s=described.exchange.branch_after_s,
        directory=DirectoryFaults(*faults),
        leg_tokens=leg_tokens,
    )


def _dry(out: Output, described: "Manifest", world: "World | PipelineWorld", dry_run: bool) -> bool:
    """Return whether this is a dry run; if so, print what would run and its hash."""
    if dry_run:
        text, around = described.canonical().decode(), dataclasses.asdict(world)
        digest = hashlib.sha256(text.encode() + one_line(around).encode()).hexdigest()
        facts = {"manifest": text, "hash": described.hash(), "world": around, "world_hash": digest}
        out.result(
            facts,
            f"{text}\n{one_line(around)}\n"
            f"hash {described.hash()}, together with the simulated network {digest}",
        )
    return dry_run


def _simulate(
    out: Output,
    described: "Manifest",
    world: "World",
    folder: Path | None,
    device: "Device",
    weights: "WeightsFolder | None",
    data: Sequence[Path],
) -> None:
    """Run the simulation and measure the result on the held-out text."""
    import torch

    from farflock.node.assembly.text import text_of
    from farflock.node.model.data import evaluation
    from farflock.node.simulate.simulation import held_out, simulate
    from farflock.node.state.paths import make_folder

    if folder is not None:
        make_folder(folder)
    torch.set_num_threads(1)
    plan, text = described.plan(), text_of(described.data, data)
    with out.progress("simulating") as progress:
        result = simulate(plan, world, text.train(), progress, folder, device, weights)
    x, y = evaluation(text.held_out(), plan.seq, EVALUATED)
    measured = held_out(plan, result.states.values(), x, y, device)
    facts = {
        "state_hash": result.state_hash,
        "rounds": result.rounds,
        "losses": result.losses,
        "held_out_loss": measured.mean,
        "held_out_standard_error": measured.standard_error,
        "bytes": result.bytes,
        "bytes_per_peer": result.bytes_per_peer,
        "virtual_s": result.virtual_s,
        "kills": result.kills,
        "steps": result.steps,
    }
    out.result(facts, "\n".join(f"{name}: {value}" for name, value in facts.items()))
