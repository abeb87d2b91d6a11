"""The disasters of `farflock sim --chaos`: seeds, tables of what struck, and how to repeat one."""

import collections
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farflock.node.cli.output import Output, one_line

if TYPE_CHECKING:
    from farflock.node.simulate.chaos import SeedReport
    from farflock.node.simulate.chaos_methods import ChaosCase


def run(
    out: Output,
    option: str,
    seeds: range,
    workers: int | None,
    name: str | None,
    dry_run: bool,
) -> None:
    """Run seeded disasters of the kind that an option names (empty: of whole replicas); exit with 1
    on a violation."""
    if not option:
        _swarms(out, seeds, workers, name, dry_run)
    else:
        kind = _pipelines(name) if option == "--pipeline" else _returns(name)
        _by_method(out, f"--chaos {option}", kind, seeds, workers, name, dry_run)


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


@dataclass(frozen=True, slots=True)
class _Kind:
    """Disasters whose seeds are counted by method: their names, the methods' cases, the case that a
    seed draws, and what runs a seed."""

    disasters: Sequence[str]
    arms: Sequence["ChaosCase"]
    case: Callable[[int], "ChaosCase"]
    run_seed: Callable[[int, str | None], "SeedReport"]


def _pipelines(name: str | None) -> _Kind:
    from farflock.node.simulate import pipeline_chaos as chaos

    arms = chaos.pipeline_arms(name)
    case = lambda seed: chaos.pipeline_case(seed, name).arm  # noqa: E731
    return _Kind(chaos.DISASTERS, arms, case, chaos.run_pipeline_seed)


def _returns(name: str | None) -> _Kind:
    from farflock.node.simulate import returns_chaos as chaos
    from farflock.node.simulate.chaos_methods import case_of, cases_of

    case = lambda seed: case_of(seed, name)  # noqa: E731
    return _Kind(chaos.COMING_BACK, cases_of(name), case, chaos.run_returns_seed)


def _by_method(
    out: Output,
    options: str,
    kind: _Kind,
    seeds: range,
    workers: int | None,
    name: str | None,
    dry_run: bool,
) -> None:
    from farflock.node.simulate.chaos import run_seeds

    arms = [[arm.method, arm.options] for arm in kind.arms]
    if _is_dry(out, seeds, {"kinds": kind.disasters, "arms": arms}, dry_run):
        return
    at_once = _at_once(seeds, workers)
    running = run_seeds(seeds.start, len(seeds), at_once, name, kind.run_seed)
    reports = _collected(out, seeds, running)
    fired, drawn = _fired(reports), collections.Counter(kind.case(seed).method for seed in seeds)
    struck = {m: {each: fired[each, m] for each in kind.disasters} for m in sorted(drawn)}
    rows = [(method, drawn[method], *counts.values()) for method, counts in struck.items()]
    out.table(("", "seeds", *kind.disasters), rows)
    facts = {"methods": dict(sorted(drawn.items())), "faults": struck}
    if _tell(out, reports, facts, [], _again(options, name)):
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
        f" the slowest recovery took {slowest_s:.1f} s",
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
