"""`farflock demo`: a swarm on this machine that trains, loses a peer, gains one, and recovers."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from farflock.node.cli.output import Output
from farflock.node.errors import Terminated, Usage


@click.command("demo")
@click.option(
    "--peers",
    type=click.IntRange(1, 8),
    default=4,
    show_default=True,
    help="Peers at the start.",
)
@click.option(
    "--steps",
    type=click.IntRange(20),
    default=390,
    show_default=True,
    help="Training steps per peer.",
)
@click.option(
    "--method", default="noloco", show_default=True, help="Training method: noloco, diloco, ddp, …"
)
@click.option(
    "--pipeline",
    is_flag=True,
    help="Split the model into three stages, so that no process holds all of it.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty folder for the files (default: a new temporary one).",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    peers: int, steps: int, method: str, pipeline: bool, folder: Path | None, as_json: bool
) -> None:
    """Watch a swarm of real processes train a language model on this machine.

    One peer is killed and a new one joins while the others keep training. At the end, the result
    is compared with ordinary data-parallel training (DDP) and with peers that do not communicate.

    With --pipeline, six processes serve the model in three stages, two per stage; one server is
    killed, then both servers of a stage. --peers and --method are ignored.

    Ctrl-C stops all processes and exits with code 130; press it again to quit immediately.
    """
    if pipeline:
        _pipeline(Output(as_json), steps, folder)
        return
    from farflock.node.cli.live import live
    from farflock.node.demo.demo import Demo
    from farflock.node.run.manifest import demo_manifest

    out = Output(as_json)
    described = demo_manifest(method, peers, steps)
    with _place(folder) as place:
        file = place / "run.toml"
        file.write_bytes(described.canonical())
        out.line(
            f"{peers} peers, {described.run.total_tokens:,} tokens, method {method};"
            f" files in {place}"
        )
        with live("farflock demo") as show, Demo(place, file, peers, show).running() as demo:
            demo.run()
        from farflock.node.demo.report import report

        with out.progress("comparing") as progress:
            plan, lines = described.plan(), demo_manifest("ddp", peers, steps).plan()
            facts = report(
                plan, lines, place, demo.children, peers, lambda name, share: progress(share)
            )
        facts |= {"peers_killed": demo.killed, "peers_joined": demo.joined}
        out.result(facts, _text(facts))


def _pipeline(out: Output, steps: int, folder: Path | None) -> None:
    from farflock.node.cli.live import live
    from farflock.node.demo.pipeline import SERVERS, STAGES, PipelineDemo, pipeline_manifest, report

    described, processes = pipeline_manifest(steps), STAGES * SERVERS
    with _place(folder) as place:
        file = place / "run.toml"
        file.write_bytes(described.canonical())
        out.line(
            f"{STAGES} stages, {processes} processes, {described.run.total_tokens:,} tokens;"
            f" files in {place}"
        )
        with (
            live("farflock demo") as show,
            PipelineDemo(place, file, processes, show).running() as demo,
        ):
            demo.run()
        with out.progress("comparing") as progress:
            facts = report(described, place, demo.children, lambda name, share: progress(share))
        facts |= {"peers_killed": demo.killed, "peers_joined": demo.joined}
        out.result(facts, _text(facts, "the unsplit model", "a sixth of the data"))


@contextmanager
def _place(named: Path | None) -> Iterator[Path]:
    """Yield a folder for the demo's files; remove a temporary one after an interruption."""
    place = named or Path(tempfile.mkdtemp(prefix="farflock-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise Usage(
            f"--folder {place} is not empty",
            "the demo's files would mix with those in it",
            "name an empty or a new folder",
        )
    try:
        yield place
    except (KeyboardInterrupt, Terminated):
        if named is None:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _text(
    facts: dict[str, object], ddp: str = "DDP, one model", none: str = "no communication"
) -> str:
    def loss(name: str) -> str:
        return f"{facts[name + '_loss']:.4f} ± {facts[name + '_error']:.4f}"

    share = facts["share_of_gain"]
    kept = (
        "too short to tell" if share is None else f"{share:.0%} of DDP's gain over no communication"
    )
    return "\n".join(
        (
            "held-out loss, nats per byte          bytes sent per peer",
            f"  swarm             {loss('held_out')}     {facts['bytes_per_peer']:>14,}",
            f"  {ddp:<17} {loss('ddp')}     {facts['ddp_bytes_per_peer']:>14,}"
            "  (ring all-reduce, bf16)",
            f"  {none:<17} {loss('none')}     {0:>14,}",
            f"  untrained {facts['untrained_loss']:.3f}, unigram {facts['unigram_loss']:.3f};"
            f" the swarm kept: {kept}",
            f"peers killed {facts['peers_killed']}, joined {facts['peers_joined']}",
            f"loss plot {facts['plot']}\ncheckpoint {facts['checkpoint']}",
            f"\n{facts['sample']}",
        )
    )
