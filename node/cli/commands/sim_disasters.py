"""`farflock sim --chaos`: seeded disasters, with or without liars among the peers."""

import collections
import hashlib
import json
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from farflock.node.cli.output import Output, one_line

if TYPE_CHECKING:
    from farflock.node.simulate.chaos import SeedReport


SLOW = 0.5  # of the rounds a minute without lies


@dataclass(frozen=True, slots=True)
class Disasters:
    """The seeds to run, in so many processes (None: one per core), of one method or all, and the
    share of peers that lie; with `twins`, each again in which they do not."""

    seeds: range
    workers: int | None
    method: str | None
    liars: float | None = None
    twins: bool = False

    def require(self) -> None:
        """Refuse an unknown method, and a share of liars that no swarm is promised to bear."""
        from farflock.node.simulate.chaos_methods import cases_of
        from farflock.node.simulate.lies import MAX_SHARE

        cases_of(self.method)

        if self.liars is not None and not 0 < self.liars <= MAX_SHARE:
            raise click.UsageError(
                f"--liars {self.liars:g} is out of range: at most a third of the voters may lie; "
                "choose a share above 0, and up to 0.333"
            )

    def command(self, seed: int) -> str:
        """Return the command that runs one seed again."""
        words = ["farflock sim --chaos --seeds 1 --first-seed", str(seed)]
        words += ["--method", self.method] if self.method else []
        words += ["--liars", f"{self.liars:g}"] if self.liars else []
        return " ".join(words)


def begin(out: Output, disasters: Disasters, dry_run: bool) -> None:
    """Check what is wanted, and run it, or show it."""
    disasters.require()
    if dry_run:
        show_plan(out, disasters)
    else:
        run(out, disasters)


def show_plan(out: Output, disasters: Disasters) -> None:
    """Print what would run, and its hash."""
    from farflock.node.simulate.chaos import KINDS
    from farflock.node.simulate.chaos_methods import PHASES, cases_of

    plan: dict[str, object] = {
        "first_seed": disasters.seeds.start,
        "seeds": len(disasters.seeds),
        "kinds": KINDS,
        "phases": sorted(set(PHASES.values())),
        "arms": [[arm.method, arm.options] for arm in cases_of(disasters.method)],
    }
    if disasters.liars:
        plan["liars"] = disasters.liars
    digest = hashlib.sha256(one_line(plan).encode()).hexdigest()
    out.result({**plan, "hash": digest}, f"{one_line(plan)}\nhash {digest}")


def run(out: Output, disasters: Disasters) -> None:
    """Run the disasters; exit with 1 on a violation, or if many seeds leave some fault, or some
    liar, untried."""
    from farflock.node.simulate.chaos import ENOUGH_SEEDS, empty_cells

    reports = _run_all(out, disasters)
    twins = _run_all(out, disasters, are_twins=True) if disasters.twins else []
    fired = sum((report.fired for report in reports), collections.Counter[tuple[str, str]]())
    empty = [f"{kind} in {phase}" for kind, phase in empty_cells(fired)]
    failures = [_failure(report, disasters) for report in reports if report.violations]
    slowest_s = max(report.recovery_s for report in reports)
    lies = _lies(reports) if disasters.liars else {}
    facts = {
        "seeds": len(reports),
        "violations": len(failures),
        "failures": failures,
        "faults": _table(out, fired),
        "empty": empty,
        "slowest_recovery_s": slowest_s,
        **lies,
        **_pace(reports, twins),
    }
    lines = [
        f"{len(failures)} of {len(reports)} seeds violated a promise;"
        f" the slowest recovery took {slowest_s} s",
        *(
            f"seed {entry['seed']}: {entry['violation']}\n  run it again: {entry['command']}"
            for entry in failures
        ),
        *([f"never fired: {', '.join(empty)}"] if empty else []),
        *_words({**lies, **_pace(reports, twins)}),
    ]
    out.result(facts, "\n".join(lines))
    is_untried = bool(empty or lies.get("idle_liars")) and len(reports) >= ENOUGH_SEEDS
    if failures or (is_untried and not disasters.method):
        raise SystemExit(1)


def _run_all(out: Output, disasters: Disasters, *, are_twins: bool = False) -> "list[SeedReport]":
    from farflock.node.simulate.chaos import run_seeds

    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    reports: list[SeedReport] = []
    seeds, count = disasters.seeds, len(disasters.seeds)
    method, liars = disasters.method, disasters.liars or 0.0
    at_once = min(disasters.workers or os.cpu_count() or 1, count)
    running = run_seeds(seeds.start, count, at_once, method, liars, are_twins=are_twins)
    with out.progress("twins" if are_twins else "seeds") as progress:
        for report in running:
            reports.append(report)
            progress(len(reports) / count)
    return reports


def _table(out: Output, fired: collections.Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Print and return how often each kind of fault met each phase."""
    from farflock.node.simulate.chaos import KINDS
    from farflock.node.simulate.chaos_methods import PHASES

    phases = sorted(set(PHASES.values()))
    out.table(("", *phases), [(kind, *(fired[kind, phase] for phase in phases)) for kind in KINDS])
    return {kind: {phase: fired[kind, phase] for phase in phases} for kind in KINDS}


def _failure(report: "SeedReport", disasters: Disasters) -> dict[str, object]:
    again = disasters.command(report.seed)
    return {"seed": report.seed, "command": again, "violation": report.violations[0]}


def _lies(reports: "Sequence[SeedReport]") -> dict[str, object]:
    """Return what the liars of all seeds did, and what it led to."""
    from farflock.node.simulate.liars.registry import MIXED
    from farflock.node.simulate.lies import LieReport

    total = LieReport()
    for report in reports:
        total.add(report.lies)
    acted: dict[str, dict[str, int]] = {name: {} for name in MIXED}
    for (name, phase), count in sorted(total.acted.items()):
        acted[name][phase] = count
    accusations: dict[str, dict[str, int]] = {}
    for (name, what), count in sorted(total.accusations.items()):
        accusations.setdefault(name, {})[what] = count
    minutes = sum(report.lasted_s for report in reports) / 60
    return {
        "liars": acted,
        "idle_liars": [name for name, phases in acted.items() if not phases],
        "seeds_of_liars": dict(_seeds_of(reports)),
        "statements": dict(total.said.most_common()),
        "refused": dict(total.refusals.most_common()),
        "accusations": accusations,
        "rounds_a_minute": sum(report.rounds for report in reports) / max(minutes, 1e-9),
    }


def _pace(reports: "Sequence[SeedReport]", twins: "Sequence[SeedReport]") -> dict[str, object]:
    """Return how many of the rounds a minute that honest twins have are left, if twins ran."""
    pairs = zip(reports, twins, strict=bool(twins))
    ratios = [(one.pace / twin.pace, one.seed) for one, twin in pairs if twin.pace]
    if not ratios:
        return {}
    least, seed = min(ratios)
    return {
        "pace": {
            "mean": sum(ratio for ratio, _ in ratios) / len(ratios),
            "median": statistics.median(ratio for ratio, _ in ratios),
            "least": least,
            "least_seed": seed,
            "below_half": sum(ratio < SLOW for ratio, _ in ratios),
        }
    }


def _seeds_of(reports: "Sequence[SeedReport]") -> collections.Counter[str]:
    """Return in how many seeds each liar acted."""
    return collections.Counter(
        name for report in reports for name in {name for name, _ in report.lies.acted}
    )


def _words(lies: dict[str, object]) -> list[str]:
    """Return lines about the liars, if there were any."""
    return [f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in lies.items()]
