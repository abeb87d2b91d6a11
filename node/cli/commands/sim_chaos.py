"""The disasters of `farflock sim --chaos`: seeds, tables of what struck, and how to repeat one."""

import collections
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from farflock.node.cli.output import Output, one_line

if TYPE_CHECKING:
    from farflock.node.simulate.chaos import SeedReport


def run(
    out: Output,
    pipeline: bool,
    seeds: range,
    workers: int | None,
    name: str | None,
    dry_run: bool,
) -> None:
    """Run seeded disasters, of pipelines or of whole replicas; exit with 1 on a violation."""
    disasters = _pipelines if pipeline else _swarms
    disasters(out, seeds, workers, name, dry_run)


def _swarms(
    out: Output, seeds: range, workers: int | None, name: str | None, dry_run: bool
) -> None:
    """Run disasters of whole replicas; many seeds that leave some fault untried fail, too."""
    from farflock.node.simulate.chaos import ENOUGH_SEEDS, KINDS, empty_cells, run_seeds
    from farflock.node.simulate.chaos_methods import PHASES, cases_of

    arms = [[arm.method, arm.options] for arm in cases_of(name)]
    phases = sorted(set(PHASES.values()))
    if _is_dry(out, seeds, {"kinds": KINDS, "phases": phases, "arms": arms}, dry_run):
        return
    at_once = _at_once(seeds, workers)
    reports = _collected(out, seeds, run_seeds(seeds.start, len(seeds), at_once, name))
    fired = _fired(reports)
    empty = [f"{kind} in {phase}" for kind, phase in empty_cells(fired)]
    out.table(("", *phases), [(kind, *(fired[kind, phase] for phase in phases)) for kind in KINDS])
    facts = {
        "faults": {kind: {phase: fired[kind, phase] for phase in phases} for kind in KINDS},
        "empty": empty,
    }
    never = [f"never fired: {', '.join(empty)}"] if empty else []
    failed = _tell(out, reports, facts, never, _again("--chaos", name))
    if failed or (empty and len(seeds) >= ENOUGH_SEEDS and not name):
        raise SystemExit(1)


def _pipelines(
    out: Output, seeds: range, workers: int | None, name: str | None, dry_run: bool
) -> None:
    from farflock.node.simulate.chaos import run_seeds
    from farflock.node.simulate.pipeline_chaos import (
        DISASTERS,
        pipeline_arms,
        pipeline_case,
        run_pipeline_seed,
    )

    arms = [[arm.method, arm.options] for arm in pipeline_arms(name)]
    if _is_dry(out, seeds, {"kinds": DISASTERS, "arms": arms}, dry_run):
        return
    at_once = _at_once(seeds, workers)
    running = run_seeds(seeds.start, len(seeds), at_once, name, run_pipeline_seed)
    reports = _collected(out, seeds, running)
    fired = _fired(reports)
    drawn = collections.Counter(pipeline_case(seed, name).arm.method for seed in seeds)
    struck = {method: {kind: fired[kind, method] for kind in DISASTERS} for method in sorted(drawn)}
    rows = [(method, drawn[method], *kinds.values()) for method, kinds in struck.items()]
    out.table(("", "seeds", *DISASTERS), rows)
    facts = {"methods": dict(sorted(drawn.items())), "faults": struck}
    if _tell(out, reports, facts, [], _again("--chaos --pipeline", name)):
        raise SystemExit(1)


def _is_dry(out: Output, seeds: range, what: Mapping[str, object], dry_run: bool) -> bool:
    """Return whether this is a dry run; if so, print what would run and its hash."""
    if dry_run:
        plan = {"first_seed": seeds.start, "seeds": len(seeds), **what}
        digest = hashlib.sha256(one_line(plan).encode()).hexdigest()
        out.result({**plan, "hash": digest}, f"{one_line(plan)}\nhash {digest}")
    return dry_run


def _at_once(seeds: range, workers: int | None) -> int:
    from farflock.node.machine import usable_cores

    return min(workers or usable_cores(), len(seeds))


def _collected(out: Output, seeds: range, running: Iterator["SeedReport"]) -> list["SeedReport"]:
    """Return the reports of all seeds; nothing else is printed meanwhile but how many are done."""
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    reports = []
    with out.progress("seeds") as progress:
        for report in running:
            reports.append(report)
            progress(len(reports) / len(seeds))
    return reports


def _fired(reports: list["SeedReport"]) -> collections.Counter[tuple[str, str]]:
    return sum((report.fired for report in reports), collections.Counter[tuple[str, str]]())


def _tell(
    out: Output,
    reports: list["SeedReport"],
    facts: Mapping[str, object],
    more: list[str],
    again: Callable[[int], str],
) -> bool:
    """Print the result, each violation with the command that repeats it; return whether there is
    any."""
    failures = [
        {"seed": each.seed, "command": again(each.seed), "violation": each.violations[0]}
        for each in reports
        if each.violations
    ]
    slowest_s = max(report.recovery_s for report in reports)
    told = {"seeds": len(reports), "violations": len(failures), "failures": failures}
    lines = [
        f"{len(failures)} of {len(reports)} seeds violated a promise;"
        f" the slowest recovery took {slowest_s} s",
        *(
            f"seed {entry['seed']}: {entry['violation']}\n  run it again: {entry['command']}"
            for entry in failures
        ),
        *more,
    ]
    out.result({**told, **facts, "slowest_recovery_s": slowest_s}, "\n".join(lines))
    return bool(failures)


def _again(options: str, name: str | None) -> Callable[[int], str]:
    """Return a function of a seed: the command that runs it again."""
    method = f" --method {name}" if name else ""
    return lambda seed: f"farflock sim {options} --seeds 1 --first-seed {seed}{method}"
