"""The report of a recipe: a table of arms or rows, its rules with the paper's numbers, and JSON.

Simulated time is the time without transfers plus the transfer time at a given rate, or the longer
of the two where exchanges run during training (`overlaps`). It is not a measurement, but it does
not flatter a method more than a real link of that rate would.
"""

import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch

from farflock import __version__
from farflock.experiments.pipelines.table import Row, Table
from farflock.experiments.reproduce.claim import Claim, Rule
from farflock.experiments.reproduce.computation import Computation
from farflock.experiments.reproduce.job import Point
from farflock.experiments.reproduce.pages import table
from farflock.experiments.reproduce.study import Result, Study, verdict
from farflock.experiments.reproduce.verdict import Finding, estimate

RATES = (10, 100, 1000)  # Mbit/s
ARMS = (
    "arm",
    "loss",
    "± SE",
    "gain kept",
    "bytes a peer",
    "of DDP's",
    "tokens",
    "seeds",
    "lr",
    "h at 100 Mbit/s",
)
NOISE = ("arm", "growth a round", "± SE", "seeds")
RULES = ("claim", "paper", "ours ± SE", "verdict", "reason")
CI = "tier ci only checks that the recipe runs; its sizes are too small to judge the claim"


def time_s(point: Point, overlaps: bool, mbit: float) -> float:
    """Return the seconds that a run takes to reach this point on links of `mbit` Mbit/s."""
    transfer_s = point.sent_bytes * 8 / (mbit * 1e6)
    return max(point.compute_s, transfer_s) if overlaps else point.compute_s + transfer_s


def facts(study: Study, results: Sequence[Result], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a study and its findings as JSON data, with the numbers of each seed."""
    return {
        **_said(study.recipe, study.tier, study.recipe.verdict, findings),
        "arms": [_arm(study, result, results) for result in results],
        "scale": _scale(study, results),
    }


def computed(
    recipe: Computation, tier: str, found: Table, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return a computation, its table and its findings as JSON data."""
    return {
        **_said(recipe, tier, recipe.rules, findings),
        "quantity": recipe.quantity,
        "rows": [_row(row) for row in found.rows],
        "scale": found.scale,
    }


def _said(
    recipe: Claim, tier: str, rules: Sequence[Rule], findings: Sequence[Finding]
) -> dict[str, Any]:
    said = verdict(tier, findings)
    return {
        "recipe": recipe.name,
        "tier": tier,
        "method": recipe.method,
        "question": recipe.question,
        "claim": recipe.claim,
        "source": recipe.source,
        "reproduced_if": recipe.reproduced_if,
        "verdict": said,
        "reason": CI if said is None else "; ".join(finding.reason for finding in findings),
        "rules": [
            _rule(tier, rule, finding) for rule, finding in zip(rules, findings, strict=True)
        ],
        "version": __version__,
        "torch": str(torch.__version__),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def arm_rows(told: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return the columns and rows of a table of arms or of a computation, from its JSON data."""
    if "rows" in told:
        return ("row", told["quantity"], "± SE", "seeds"), [
            (row["name"], f"{row['mean']:.4g}", _shown(row["error"]), row["seeds"])
            for row in told["rows"]
        ]
    if "loss" not in {name for arm in told["arms"] for name in arm["mean"]}:
        return NOISE, [
            (
                arm["label"],
                _shown(arm["mean"].get("growth")),
                _shown(arm["error"].get("growth")),
                arm["seeds"],
            )
            for arm in told["arms"]
        ]
    return ARMS, [_arm_row(arm) for arm in told["arms"]]


def rule_rows(told: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return the rows of the table of rules, from JSON data."""
    return [
        (rule["says"], rule["paper"], rule["ours"], rule["verdict"] or "no verdict", rule["reason"])
        for rule in told["rules"]
    ]


def markdown(told: dict[str, Any]) -> str:
    """Return the study as a section of docs/reproductions.md."""
    columns, rows = arm_rows(told)
    claim = f"**Claim**: {told['claim']} ({told['source']})"
    lines = [
        f"### {told['recipe']} ({told['tier']})",
        "",
        f"**{(told['verdict'] or 'no verdict').capitalize()}.** {told['question']}",
        "",
        f"{claim}. **Reproduced if** {told['reproduced_if']}",
        "",
        *table(RULES[:-1], [row[:-1] for row in rule_rows(told)]),
        "",
        *(f"- {rule['reason']}" for rule in told["rules"]),
        "",
        *table(columns, rows),
        "",
        f"{told['scale']}. Farflock {told['version']}, torch {told['torch']}, {told['date']}.",
    ]
    return "\n".join(lines)


def _rule(tier: str, rule: Rule, finding: Finding) -> dict[str, Any]:
    return {
        "says": rule.says,
        "kind": rule.kind,
        "arms": rule.arms,
        "metric": rule.metric,
        "paper": rule.paper,
        "ours": finding.ours,
        "verdict": None if tier == "ci" else finding.word,
        "reason": CI if tier == "ci" else finding.reason,
    }


def _row(row: Row) -> dict[str, Any]:
    found = estimate(row.values, row.exact)
    return {
        "name": row.name,
        "mean": found.mean,
        "error": found.error if 0 < found.error < math.inf else None,
        "seeds": "exact" if row.exact else len(row.values),
        "values": row.values,
    }


def _arm(study: Study, result: Result, results: Sequence[Result]) -> dict[str, Any]:
    names = sorted({name for outcome in result.outcomes for name in outcome.metrics})
    estimates = {name: estimate(values) for name in names if (values := result.values(name))}
    lines = {line.name: line for line in results if line.name in ("ddp", "none")}
    return {
        "name": result.name,
        "label": result.label,
        "lr": result.setting[0],
        "warmup": result.setting[1],
        "at_edge": result.at_edge,
        "grid": [
            {"lr": lr, "warmup": warmup, "loss": loss} for (lr, warmup), loss in result.grid.items()
        ],
        "seeds": len(result.outcomes),
        "diverged": sum(outcome.diverged for outcome in result.outcomes),
        "mean": {name: found.mean for name, found in estimates.items()},
        "error": {
            name: found.error if math.isfinite(found.error) else None
            for name, found in estimates.items()
        },
        "values": {name: result.values(name) for name in names},
        "gain_kept": _kept(result, lines),
        "of_ddp_bytes": _of_ddp(result, lines),
        "hours_100": _hours(result, 100),
        "curves": [
            [_point(point, outcome.overlaps) for point in outcome.curve]
            for outcome in result.outcomes
        ],
        "took_s": sum(outcome.took_s for outcome in result.outcomes),
    }


def _point(point: Point, overlaps: bool) -> dict[str, float]:
    times = {f"time_s_{rate}_mbit": round(time_s(point, overlaps, rate), 2) for rate in RATES}
    return {
        "tokens": point.tokens,
        "bytes": point.sent_bytes,
        "loss": point.loss,
        "spread": point.spread,
        **times,
    }


def _kept(result: Result, lines: dict[str, Result]) -> float | None:
    """Return the share of DDP's mean gain over no communication that an arm keeps.

    None if a run diverged, or if DDP gains nothing.
    """
    losses = [lines[name].values("loss") for name in ("none", "ddp") if name in lines] + [
        result.values("loss")
    ]
    if len(losses) < 3 or not all(losses):
        return None
    none, ddp, own = (estimate(values).mean for values in losses)
    return (none - own) / (none - ddp) if none > ddp else None


def _of_ddp(result: Result, lines: dict[str, Result]) -> float | None:
    own, ddp = result.values("bytes"), lines["ddp"].values("bytes") if "ddp" in lines else []
    return estimate(own).mean / estimate(ddp).mean if own and ddp and all(ddp) else None


def _hours(result: Result, rate: float) -> float | None:
    times = [
        time_s(outcome.curve[-1], outcome.overlaps, rate)
        for outcome in result.outcomes
        if outcome.curve
    ]
    return estimate(times).mean / 3600 if times else None


def _arm_row(arm: dict[str, Any]) -> tuple[object, ...]:
    mean, error = arm["mean"], arm["error"]
    if "loss" not in mean:
        return (
            arm["label"],
            f"{arm['diverged']} of {arm['seeds']} seeds diverged",
            *("-" for _ in ARMS[2:]),
        )
    kept, share = arm["gain_kept"], arm["of_ddp_bytes"]
    return (
        arm["label"],
        f"{mean['loss']:.4f}",
        _shown(error["loss"]),
        "-" if kept is None else f"{kept:.0%}",
        f"{mean['bytes']:,.0f}",
        "-" if share is None else f"{share:.2%}",
        f"{mean['tokens']:,.0f}",
        arm["seeds"],
        f"{arm['lr']:g}{' (edge)' if arm['at_edge'] else ''}",
        _shown(arm["hours_100"]),
    )


def _scale(study: Study, results: Sequence[Result]) -> str:
    sizes = study.sizes
    if study.recipe.experiment == "noise":
        return f"{sizes.peers} replicas, {sizes.steps} rounds, {len(sizes.seeds)} seeds"
    parameters = max(
        (outcome.parameters for result in results for outcome in result.outcomes), default=0
    )
    tokens = sizes.steps * sizes.batch * sizes.seq
    place = "" if study.device == "cpu" else f", on {study.device}"
    return (
        f"{parameters:,} parameters, {sizes.peers} peers unless stated otherwise, "
        f"{sizes.steps} steps of {sizes.batch} x {sizes.seq} tokens ({tokens:,} in all), "
        f"{len(sizes.seeds)} seeds, a step of {sizes.step_s:g} s{place}"
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
