"""`farflock demo`: a swarm on this machine that trains, loses a peer, gains one, and recovers."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import MAX_CODEC_THREADS, device_option
from farflock.node.cli.output import Output
from farflock.node.errors import Terminated, Usage

if TYPE_CHECKING:
    from farflock.node.run.terms import RunPlan

METHOD = "best-100"  # of DDP's gain it keeps most, at the fewest bytes (docs/quality.md)


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
    help="Steps per peer.",
)
@click.option(
    "--method",
    help="A method or preset: noloco, diloco, best-500, ..."
    f" (default: {METHOD}; ddp with --pipeline).",
)
@click.option(
    "--pipeline",
    is_flag=True,
    help="Train a model in three stages, none of whose six processes holds all of it.",
)
@click.option(
    "--codec-threads",
    type=click.IntRange(1, MAX_CODEC_THREADS),
    default=1,
    show_default=True,
    help="CPU threads of each process that encode what is sent and check what comes back.",
)
@device_option()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write (default: a new folder).",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object as the last line of standard output.",
)
def command(
    peers: int,
    steps: int,
    method: str | None,
    pipeline: bool,
    codec_threads: int,
    device: str,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Watch a swarm of real processes train a language model on this machine.

    One peer is killed, a newcomer joins, and the founder is frozen for a while. At the end the
    swarm is compared with data parallelism and with a peer that never communicates.

    --pipeline ignores --peers: a trainer and six servers, two per stage, of which one is killed,
    and then both servers of one stage. The servers of each stage use the method among themselves.

    Ctrl-C ends all processes after they have saved, and exits with 130; press Ctrl-C again to quit
    immediately."""
    from farflock.node.model.device import choose

    choose(device)  # or each process would refuse it
    if pipeline:
        _pipeline(Output(as_json), steps, method, folder, device)
        return
    from farflock.node.cli.live import live
    from farflock.node.demo.demo import Demo
    from farflock.node.demo.figure import warn_of_no_figure
    from farflock.node.run.manifest import demo_manifest

    out, method = Output(as_json), method or METHOD
    warn_of_no_figure(out.line)
    described = demo_manifest(method, peers, steps)
    with _place(folder) as place:
        file = place / "run.toml"
        file.write_bytes(described.canonical())
        out.line(
            f"{peers} peers, {described.run.total_tokens:,} tokens, method {method}; "
            f"files in {place}"
        )
        contributors = _contributors(described.plan())
        with (
            live("farflock demo") as show,
            Demo(
                place, file, peers, show, steps, contributors, codec_threads, device
            ).running() as demo,
        ):
            demo.run()
        from farflock.node.demo.report import report

        with out.progress("comparing") as progress:
            plan, lines = described.plan(), demo_manifest("ddp", peers, steps).plan()
            facts = report(
                plan,
                lines,
                place,
                demo.children,
                demo.marks,
                peers,
                lambda name, share: progress(share),
            )
        facts |= {"peers_killed": demo.killed, "peers_joined": demo.joined}
        out.result(facts, _text(facts, demo.missing()))


def _contributors(plan: "RunPlan") -> int:
    """Return the least number of contributors of a round that counts for a newcomer."""
    if plan.method == "local":
        return 0
    return 1 if plan.options.get("enough") else 2  # `async` closes a round with one arrival


def _pipeline(
    out: Output, steps: int, method: str | None, folder: Path | None, device: str
) -> None:
    from farflock.node.cli.live import live
    from farflock.node.demo import pipeline
    from farflock.node.demo.figure import warn_of_no_figure

    warn_of_no_figure(out.line)
    described = pipeline.pipeline_manifest(steps, method or pipeline.METHOD)
    processes = pipeline.STAGES * pipeline.SERVERS
    with _place(folder) as place:
        file = place / "run.toml"
        file.write_bytes(described.canonical())
        out.line(
            f"{pipeline.STAGES} stages, {processes} processes, method {described.method.name}, "
            f"{described.run.total_tokens:,} tokens; files in {place}"
        )
        with (
            live("farflock demo") as show,
            pipeline.PipelineDemo(
                place, file, processes, show, steps, contributors=0, device=device
            ).running() as demo,
        ):
            demo.run()
        with out.progress("comparing") as progress:
            facts = pipeline.report(
                described, place, demo.children, demo.marks, lambda name, share: progress(share)
            )
        facts |= {"peers_killed": demo.killed, "peers_joined": demo.joined}
        text = _text(facts, demo.missing(), "the unsplit model", "a sixth of the data")
        out.result(facts, text)


def _drawn(path: str) -> str:
    if path.endswith(".csv"):  # without matplotlib
        return f"losses: {path}"
    return f"loss plot: {path} (SVG and CSV next to it)"


@contextmanager
def _place(named: Path | None) -> Iterator[Path]:
    """Yield a folder for the demo's files; remove a temporary one after an interruption."""
    from farflock.node.state.paths import make_folder

    place = named or Path(tempfile.mkdtemp(prefix="farflock-demo-"))
    make_folder(place)
    if any(place.iterdir()):
        raise Usage(
            f"{place} is not empty",
            "the demo's files would mix with those there",
            "name an empty or a new --folder",
        )
    try:
        yield place
    except (KeyboardInterrupt, Terminated):
        if named is None:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _text(
    facts: dict[str, object],
    missing: Sequence[str],
    ddp: str = "DDP, one model",
    none: str = "no communication",
) -> str:
    def line(name: str, loss: str, sent: object) -> str:
        of = f"{facts[loss + '_loss']:.4f} ± {facts[loss + '_error']:.4f}"
        return f"  {name:<19} {of:<24} {sent:>17,}"

    share = facts["share_of_gain"]
    kept = (
        "the run is too short to tell what the swarm kept of DDP's gain over no communication"
        if share is None
        else f"the swarm kept {share:.0%} of DDP's gain over no communication"
    )
    return "\n".join(
        (
            f"  {'':<19} {'held-out loss, nats/byte':<24} {'bytes sent / peer':>17}",
            line("the swarm", "held_out", facts["bytes_per_peer"]),
            line(ddp, "ddp", facts["ddp_bytes_per_peer"]) + "  (all-reduce)",
            line(none, "none", 0),
            f"{kept}; untrained {facts['untrained_loss']:.3f}, unigram {facts['unigram_loss']:.3f}",
            f"peers killed: {facts['peers_killed']}; joined: {facts['peers_joined']}",
            *missing,
            _drawn(str(facts["plot"])),
            f"checkpoint: {facts['checkpoint']}",
            f"\n{facts['sample']}",
        )
    )
