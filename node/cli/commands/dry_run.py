"""The part of `--dry-run` that says how large a run is, and whether a line can carry it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.join_sum import join_facts, join_text
from farflock.swarm.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from farflock.node.data.shard_table import ShardTable
    from farflock.node.process.network import MachineOptions
    from farflock.node.run.manifest import Manifest
    from farflock.node.train.run_size import StreamSize

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", re.IGNORECASE)
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
HOUR_S = 3600.0


def bytes_per_s(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Return a rate such as 20mbit in bytes per second; anything else is a usage error."""
    match = _RATE.fullmatch(text)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is not a rate; write it as 20mbit or 1.5gbit")
    return float(match[1]) * _PREFIXES[match[2].lower()] / 8


def size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the assumptions of an estimate to a command with `--dry-run`."""
    options = (
        click.option(
            "--uplink",
            callback=bytes_per_s,
            default="20mbit",
            show_default=True,
            metavar="RATE",
            help="With --dry-run: the slower direction of a peer's line, as in 1.5gbit.",
        ),
        click.option(
            "--peers",
            type=click.IntRange(1, MAX_MEMBERS),
            help="With --dry-run: members (default: as many as the run waits for, at least 2).",
        ),
        click.option(
            "--step",
            "step_s",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="With --dry-run: seconds that a local step takes.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def members_of(described: "Manifest") -> int:
    """Return the number of members for which a run is estimated unless told otherwise."""
    return max(described.exchange.start_peers, 2)


@dataclass(frozen=True, slots=True)
class Line:
    """The assumptions of an estimate: members, bytes per second of the slower direction of a
    member's line, and seconds of a local step."""

    peers: int
    bytes_per_s: float
    step_s: float


def size_facts(
    described: "Manifest", line: Line, stored_bytes: int | None = None
) -> dict[str, Any]:
    """Return the sizes of a run for `--json`, sums over a round of each stream among them; raise
    `Usage` if a stream cannot travel at all. `stored_bytes` are those of the weights in the folder
    that a founder's run starts from."""
    from farflock.node.run.memory import (
        StepChoices,
        needed_bytes,
        needed_device_bytes,
        needed_stage_bytes,
    )
    from farflock.node.train.run_size import exchanged, stream_sizes

    plan, pipeline = described.plan(), described.pipeline_plan()
    streams = stream_sizes(plan, pipeline)
    if pipeline is None:
        beside, measuring = exchanged(plan, line.peers, streams), StepChoices(evaluates=True)
        host, device = needed_bytes(plan, beside), needed_device_bytes(plan)
        evaluates = described.evaluation.every > 0
        measured = needed_bytes(plan, beside, measuring) if evaluates else host
    else:
        stages = range(len(pipeline.stages))
        host = measured = max(needed_stage_bytes(plan, pipeline, stage) for stage in stages)
        device = 0
    facts = [_stream_facts(stream, line) for stream in streams]
    return {
        "parameters": plan.model.parameters(),
        "shards": sum(each["shards"] for each in facts),
        "bytes_per_round": sum(each["round_bytes"] for each in facts),
        "seconds_per_round": sum(each["round_s"] for each in facts),
        "memory_host": host,
        "memory_host_evaluating": measured,
        "memory_device": device,
        **asdict(line),
        "start": _start_facts(described, line, stored_bytes),
        "join": join_facts(described, streams, line.peers, line.bytes_per_s, line.step_s),
        "streams": facts,
    }


def _start_facts(
    described: "Manifest", line: Line, stored_bytes: int | None
) -> dict[str, Any] | None:
    """Return what the weights that a run starts from take; None if they come from its seed."""
    from farflock.node.run.memory import VALUE_BYTES, stage_parameters

    plan, pipeline = described.plan(), described.pipeline_plan()
    if plan.weights is None:
        return None
    spans = [range(plan.model.layers)] if pipeline is None else pipeline.stages
    largest = VALUE_BYTES * max(stage_parameters(plan.model, span) for span in spans)
    return {
        "weights": plan.weights,
        "architecture": plan.model.architecture,
        "licence": described.to_tables()["model"]["licence"],
        "stored_bytes": stored_bytes,
        "memory_bytes": largest,
        "download_s": largest / line.bytes_per_s,
    }


def _stream_facts(stream: "StreamSize", line: Line) -> dict[str, Any]:
    sent_bytes, seconds = (
        stream.sent_bytes(line.peers),
        stream.seconds(line.peers, line.bytes_per_s),
    )
    # A round begins after its steps, and a later one not before the line is free again.
    every_s = max(stream.steps * line.step_s, seconds)
    min_deadline_s = stream.min_deadline_s(line.peers, line.bytes_per_s)
    return {
        **asdict(stream),
        "round_bytes": sent_bytes,
        "round_s": seconds,
        "hour_bytes": sent_bytes * HOUR_S / every_s if math.isfinite(every_s) else 0.0,
        "min_deadline_s": min_deadline_s,
        "meets_deadline": min_deadline_s <= stream.deadline_s,
    }


COLUMNS = ("stream", "kind", "values", "shards", "a round", "on this line", "every", "an hour")


def data_facts(tables: "Sequence[ShardTable]") -> dict[str, Any]:
    """Return the sizes of a run's prepared data."""
    return {
        "roots": [table.root for table in tables],
        "tokens": sum(table.all_tokens for table in tables),
        "shards": sum(map(len, tables)),
        "bytes": sum(table.all_tokens * table.index.token_type.itemsize for table in tables),
        "first_bytes": sum(max(map(table.size, range(table.train))) for table in tables),
    }


def disk_facts(described: "Manifest", machine: "MachineOptions") -> dict[str, int]:
    """Return what a node takes of this machine's disk, in bytes; raise `Failure` if `--disk` allows
    too little."""
    from farflock.node.errors import Failure
    from farflock.node.process.room import with_disk

    plan = with_disk(machine, described, Failure).disk_plan
    assert plan is not None, "it was just made"
    return plan._asdict()


def disk_text(disk: dict[str, int], facts: dict[str, Any] | None, machine: "MachineOptions") -> str:
    """Return a line on the disk, and one on prepared data if the run has such."""
    from farflock.node.process.disk import DiskPlan

    line = f"disk       {DiskPlan(**disk)}"
    if facts is None:
        return line
    head = (
        f"{line}\ndata       {facts['tokens']:,} tokens in {facts['shards']:,} shards,"
        f" {_bytes(facts['bytes'])}"
    )
    if machine.data:
        return f"{head}; read in place"
    return (
        f"{head}; {_bytes(facts['first_bytes'])} are fetched before the first step, and then what"
        f" is read, of which {_bytes(min(facts['bytes'], disk['data']))} stay on the disk"
        " (--disk)"
    )


def size_text(facts: dict[str, Any]) -> str:
    """Return the sizes as lines for people."""
    from farflock.node.cli.output import plain_table
    from farflock.node.machine import host_memory

    needed, free_bytes = facts["memory_host"], host_memory().free
    verdict = "" if needed <= free_bytes else ", so this machine would refuse to train it"
    measuring = facts["memory_host_evaluating"]
    if needed <= free_bytes < measuring:
        verdict = f", less than the {_bytes(measuring)} of a member that evaluates the run too"
    lines = [
        f"parameters {facts['parameters']:,}",
        f"memory     about {_bytes(needed)} to train the model, or its largest stage;"
        f" {_bytes(free_bytes)} are free here{verdict}",
        f"line       {facts['bytes_per_s'] * 8 / 1e6:,g} Mbit/s (--uplink),"
        f" {facts['peers']} peers (--peers), {facts['step_s']:g} s a step (--step)",
    ]
    if (start := facts["start"]) is not None:
        lines.append(_start_text(start))
    lines.append(join_text(facts["join"]))
    if facts["memory_device"]:
        lines.append(
            f"device     about {_bytes(facts['memory_device'])} of its memory, if one trains whole"
            " batches; less with --micro-batch"
        )
    streams: Sequence[dict[str, Any]] = facts["streams"]
    if not streams:
        return "\n".join([*lines, "exchange   none: nothing travels"])
    rows = [
        (
            each["stream"],
            each["kind"],
            f"{each['values']:,}",
            f"{each['shards']:,}",
            _bytes(each["round_bytes"]),
            f"{each['round_s']:,.1f} s",
            f"{each['steps']:g} steps",
            _bytes(each["hour_bytes"]),
        )
        for each in streams
    ]
    late = [
        f"stream {each['stream']} cannot meet its deadline of {each['deadline_s']:,g} s on this"
        f" line; set exchange.deadline_s to {math.ceil(each['min_deadline_s']):,} or more, exchange"
        " less often or fewer bytes, or take members with faster lines"
        for each in streams
        if not each["meets_deadline"]
    ]
    return "\n".join([*lines, plain_table(COLUMNS, rows), *late])


def _start_text(start: dict[str, Any]) -> str:
    stored = start["stored_bytes"]
    read = "" if stored is None else f"a founder reads {_bytes(stored)} of files; "
    return (
        f"weights    {start['architecture']} {start['weights'][:16]}…, licence {start['licence']}:"
        f" {read}{_bytes(start['memory_bytes'])} of memory for the model, or its largest stage;"
        f" a newcomer downloads as much at least, {start['download_s']:,.0f} s on this line"
    )


def _bytes(count: float) -> str:
    """Return a number of bytes in the largest fitting unit, with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
        count /= 1000
    raise AssertionError
