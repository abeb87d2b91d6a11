"""`farflock sim`: the same run on a simulated network, in virtual time."""

from pathlib import Path

import click

from farflock.node.output import Output


@click.command("sim")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Override one value of the manifest.")
@click.option("--peers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--loss", type=click.FloatRange(0, 0.9), default=0.0, show_default=True, help="Share of frames lost.")
@click.option("--churn", type=click.FloatRange(0.1), help="Mean seconds between two kills; the killed come back.")
@click.option("--rate", type=click.FloatRange(0.01), default=100.0, show_default=True, help="Mbit/s of every line.")
@click.option(
    "--latency", type=click.FloatRange(0), default=20.0, show_default=True, help="ms, one way, of every line."
)
@click.option(
    "--step", "step_s", type=click.FloatRange(0.001), default=0.5, show_default=True, help="Seconds a step takes."
)
@click.option("--lost", type=click.FloatRange(0, 1), default=0.0, help="Share of stores that the directory loses.")
@click.option("--stale", type=click.FloatRange(0), default=0.0, help="Seconds by which the directory may lag behind.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Save legs here, and go on from them.")
@click.option("--leg", "leg_tokens", type=click.IntRange(1), help="With --folder: tokens from one leg to the next.")
@click.option("--chaos", is_flag=True, help="Seeded disasters instead of one run; a violation is a seed.")
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="With --chaos: how many.")
@click.option("--first-seed", type=click.IntRange(0), default=0, show_default=True, help="With --chaos: the first.")
@click.option("--dry-run", is_flag=True, help="Print the resolved manifest and its hash, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object.")
def command(
    manifest: Path | None,
    assignments: tuple[str, ...],
    peers: int,
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
    seeds: int,
    first_seed: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run MANIFEST with real training steps among simulated peers. The same seed gives the same state hash."""
    from farflock.node.manifest import load, simulated_default

    out = Output(as_json)
    if leg_tokens and not folder:
        raise click.UsageError("--leg saves the run now and then, so it needs a --folder")
    if chaos:
        _disasters(out, first_seed, seeds)
        return
    described = load(manifest, assignments) if manifest else simulated_default(assignments)
    if dry_run:
        text = described.canonical().decode()
        out.result({"manifest": text, "hash": described.hash()}, f"{text}\nhash {described.hash()}")
        return
    import torch

    from farflock.node.corpus import load_corpus
    from farflock.node.simulation import World, simulate
    from farflock.node.tokenizer import ByteTokenizer
    from farflock.swarm.memory import DirectoryFaults
    from farflock.swarm.sim import LinkModel

    torch.set_num_threads(1)
    tokens = ByteTokenizer().encode(load_corpus(described.data.corpus, described.data.sha256 or None).train)
    link = LinkModel(rate * 125_000, rate * 125_000, latency / 1000, latency / 4000, loss)
    world = World(
        peers,
        described.run.total_tokens,
        link,
        step_s,
        churn_s=churn,
        view_s=described.exchange.view_s,
        directory=DirectoryFaults(stale, lost),
        leg_tokens=leg_tokens,
    )
    with out.progress("simulating") as progress:
        result = simulate(described.plan(), world, tokens, progress, folder)
    facts = {
        "state_hash": result.state_hash,
        "rounds": result.rounds,
        "losses": result.losses,
        "bytes": result.bytes,
        "bytes_per_peer": result.bytes_per_peer,
        "virtual_s": result.virtual_s,
        "kills": result.kills,
        "steps": result.steps,
    }
    out.result(facts, "\n".join(f"{name}: {value}" for name, value in facts.items()))


def _disasters(out: Output, first_seed: int, seeds: int) -> None:
    """Run seeded disasters; the report counts the faults that fired, by kind and phase of an exchange."""
    import collections
    import logging

    from farflock.node.chaos import KINDS, PHASES, cells, run_seeds

    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    fired: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = []
    with out.progress("seeds") as progress:
        for done, report in enumerate(run_seeds(first_seed, seeds), 1):
            fired += report.fired
            progress(done / seeds)
            for violation in report.violations[:1]:
                command = f"farflock sim --chaos --seeds 1 --first-seed {report.seed}"
                failures.append({"seed": report.seed, "command": command, "violation": violation})
    phases = sorted(set(PHASES.values()))
    rows = [f"{kind:10}" + "".join(f"{fired[kind, phase]:9}" for phase in phases) for kind in KINDS]
    empty = [f"{kind} in {phase}" for kind, phase in cells() if not fired[kind, phase]]
    text = "\n".join((f"{'':10}" + "".join(f"{phase:>9}" for phase in phases), *rows))
    failed = "\n".join(f"seed {entry['seed']}: {entry['violation']}\n  again: {entry['command']}" for entry in failures)
    faults = {kind: {phase: fired[kind, phase] for phase in phases} for kind in KINDS}
    facts = {"seeds": seeds, "violations": len(failures), "failures": failures, "faults": faults, "empty": empty}
    out.result(facts, f"{text}\n{len(failures)} of {seeds} seeds with a violation\n{failed}")
    if failures:
        raise SystemExit(1)
