"""docs/reference/events.md and status.md: what a node writes down, read from the code."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
from generate.page import Words, code, described, page, table

from farflock.experiments.measure.metric import Metric
from farflock.node.process.status import (
    DataStatus,
    DownloadStatus,
    EvaluationStatus,
    PartnerStatus,
    Status,
    Waiting,
)
from farflock.node.sinks.measures import MEANINGS, prometheus_name
from farflock.node.state import history
from farflock.node.train.driver import Apply
from farflock.optimizers.method import All, Exchange, ExchangeKey, Result

ROOT = Path(__file__).parents[2]
EVENTS = """
A node's folder holds what happened while it trained. All files are bounded, and may be read while
the node writes.

| file | what is in it |
|---|---|
| `events.jsonl`, `events.1.jsonl` | one event a line, the older file first |
| `receipts.jsonl`, `receipts.1.jsonl` | one applied round a line |
| `run.db` | the numbers of inner steps (SQLite) |
| `measures.csv`, `measures.1.csv` | [measures](measures.md) of every few seconds, a row each |
| `status.json` | what the node does now: see [status](status.md) |

Each line is a JSON object with `time_s`, the wall clock in seconds since 1970. [Read the
receipts](../how-to/read-receipts.md) shows how to use them.
"""
MEASURES = """
What a node measures, wherever that is shown: in `measures.csv` and `farflock log`, in TensorBoard,
Weights & Biases and Prometheus ([watch a run](../how-to/watch-a-run.md)), and as numbers of
`SwarmOptimizer.measures()`. What is not known yet is left out, and in CSV it is empty.
"""
STATUS = """
A node writes `status.json` into its folder at most once a second, when something in it has
changed. `farflock status --json` prints it with one more field, `running`: whether the process
lives.
"""


def make_events() -> str:
    """Return the page of events, receipts, numbers and bench lines."""
    sections = {
        "Events": _events(),
        "Receipts": "Each line of `receipts.jsonl` is a round that was applied.\n\n"
        + described("receipts", _receipt(), ("field", "meaning")),
        "How a round ended": described("statuses", _statuses(), ("status", "meaning")),
        "run.db": _database(),
        "Lines of farflock bench": described(
            "metric", [field.name for field in dataclasses.fields(Metric)], ("field", "meaning")
        ),
    }
    return page("Events, receipts and numbers", EVENTS, sections)


def make_status() -> str:
    """Return the page of status.json."""
    heads = ("field", "meaning")
    sections = {
        "Fields": described("status", Status.__struct_fields__, heads),
        "partners": described("partner", PartnerStatus.__struct_fields__, heads),
        "evaluation": described("evaluation", EvaluationStatus.__struct_fields__, heads),
        "waits": described("waiting", Waiting.__struct_fields__, heads),
        "download": described("download", DownloadStatus.__struct_fields__, heads),
        "data": described("data", DataStatus.__struct_fields__, heads),
    }
    example = Status(
        pid=1234, run="…", peer="12D3KooW…", invite="farflock:…", step=120, tokens=61_440,
        total_tokens=1_000_000, loss=2.31, view=4, members=("12D3KooW…", "12D3KooX…"),
        is_member=True,
        partners=(PartnerStatus("12D3KooX…", "alive", "direct", 21.5),),
        waits=(Waiting("pairs", 3, ("12D3KooX…",), 12.5),), sent_bytes=940_000,
        received_bytes=939_000, unsure_rounds=0, dropped={}, rounds={"ok": 2}, last_round=2,
        tokens_per_s=5120.0,
    )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(example), indent=2).decode()
    sections["An example"] = f"```json\n{text}\n```"
    return page("status.json", STATUS, sections)


def make_measures() -> str:
    """Return the page of measures."""
    rows = [(code(name), said, code(prometheus_name(name))) for name, said in MEANINGS.items()]
    return page("Measures", MEASURES, {"Names": table(("name", "meaning", "in Prometheus"), rows)})


def kinds() -> dict[str, set[str]]:
    """Return the events that the code of nodes can write, with their fields."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "node").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for kind, fields in _written(node):
                    found.setdefault(kind, set()).update(fields)
    return found | {"round": {"stream", "round", "status", "peers"}}


def _written(call: ast.Call) -> Iterator[tuple[str, set[str]]]:
    """Yield the kinds and fields that a call writes."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("report", "_report", "event") or not call.args:
        return
    first = call.args[0]
    options = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
    fields = {word.arg for word in call.keywords if word.arg}
    for value in call.args[1:]:
        if isinstance(value, ast.Dict):
            fields |= {key.value for key in value.keys if _is_text(key)}
    if any(map(_is_text, options)) and name + str(options[0].value) != "report":
        for option in options:
            yield option.value, fields
    elif isinstance(first, ast.Dict):  # of a callback that knows the kind: asynchronous pipelines
        yield "delay", {key.value for key in first.keys if _is_text(key)}


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _events() -> str:
    words, rows = Words("events"), []
    for kind, fields in sorted(kinds().items()):
        said = "<br>".join(f"{code(name)}: {words[f'{kind}.{name}']}" for name in sorted(fields))
        rows.append((code(kind), words[kind], said))
    words.close()
    intro = "Each line of `events.jsonl` has a `kind`:\n\n"
    return intro + table(("kind", "when", "fields"), rows)


def _receipt() -> list[str]:
    """Return the fields of the summary of a round, and those that are added to it."""
    exchange = Exchange(ExchangeKey("delta", 0), "mean", All(), {})
    summary = Apply(exchange, Result("ok", 1)).summary
    return [*(name for name in summary if name != "peers"), "stage", "sent_bytes", "received_bytes"]


def _statuses() -> tuple[str, ...]:
    return get_args(get_type_hints(Result)["status"])


def _database() -> str:
    return (
        f"The table `metrics` of `{history.DATABASE}` has a row for each number: `name` (`loss`,"
        " `held_out`),"
        " `step`, `time_s`, `value` (null for NaN), `span` and `count`. The newest"
        f" {history.KEPT:,} steps are kept as they are; older ones become means over"
        f" {history.ROLL} rows, `span` steps long and of `count` values. The file is in WAL mode,"
        " so that readers never disturb the node, unless its file system cannot."
    )
