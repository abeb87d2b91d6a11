"""A whole run of a large model: two processes on loopback train it and exchange, with everything
that `SwarmOptimizer` has around a round.

`whole.METHOD.SIZE` is the highest anonymous memory of a process, from the beginning of its run to
its last round. The yardstick is what must be there: weights, gradients, the inner optimizer's
moments, the method's state unless it is on the disk, a reducer's residuals, 1.25 times the payloads
that a member holds in a round, and 1 GiB for Python, torch and the activations.
`whole.cpu.METHOD.SIZE` is the processor time of a process in a round, from the end of the backward
pass to the new weights. Its yardstick is that of a forward and backward pass, over one short
sequence.

`whole.join.METHOD.SIZE` is the highest anonymous memory of a process that joins after a round, and
downloads the state, until it is a member. Its yardstick is weights, the method's state as above,
and 1 GiB.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from farflock.experiments.bench.round import METHODS, WITH_MOMENTS, size_name
from farflock.experiments.bench.workers.bare import plan_of
from farflock.experiments.bench.workers.whole_peer import Settings
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.run.terms import RunPlan
from farflock.node.train.run_size import state_bytes, stream_sizes

WORKER = "farflock.experiments.bench.workers.whole_peer"
PEERS = 2
ALLOWED_SHARE, ALLOWED_BYTES = 1.25, 1024**3
DEADLINE_S = 3600.0
END_TIMEOUT_S = 60.0
WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes of a weight
MOMENTS = {"sgd": 0, "adamw": 2}
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is trained, and where the method's state is."""

    model: ModelConfig
    dtype: Literal["float32", "bfloat16"]
    inner: Literal["sgd", "adamw"]
    outer: Literal["host", "disk"]
    rounds: int
    seq: int = 8


QUICK = Case(PRESETS["demo"], "float32", "adamw", "host", 2)
CASES = (
    Case(
        ModelConfig(
            dim=768,
            layers=12,
            heads=12,
            kv_heads=12,
            ffn_dim=2048,
            vocab_size=50_304,
            context=1024,
        ),
        "float32",
        "adamw",
        "host",
        rounds=10,
    ),
    Case(
        ModelConfig(
            dim=1024,
            layers=20,
            heads=16,
            kv_heads=16,
            ffn_dim=2816,
            vocab_size=50_304,
            context=1024,
        ),
        "float32",
        "adamw",
        "host",
        rounds=1,
    ),
    Case(  # the shape of Llama 3.2 1B
        ModelConfig(
            dim=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            ffn_dim=8192,
            vocab_size=128_256,
            context=2048,
        ),
        "bfloat16",
        "sgd",
        "disk",
        rounds=1,
    ),
)


def run(options: Options) -> Iterator[Metric]:
    """Yield `whole.METHOD.SIZE`, `whole.cpu.METHOD.SIZE` and `whole.join.METHOD.SIZE` for each
    method."""
    if not sys.platform.startswith("linux"):
        raise NotMeasured("anonymous memory is measured on Linux only")
    case = QUICK if options.quick else case_of(options.parameters)
    size = size_name(case.model.parameters())
    for method in _measured(case, options.method):
        metrics = f"whole.{method}.{size}", f"whole.cpu.{method}.{size}"
        if any(map(options.wants, metrics)):
            peers = _peers(case, method)
            yield _memory(metrics[0], case, method, peers)
            yield _time(metrics[1], peers)
        if options.wants(join := f"whole.join.{method}.{size}"):
            yield _join(join, case, method)


def _measured(case: Case, wanted: str | None) -> list[str]:
    """Return the methods to measure: `wanted`, or all that this case's optimizer can serve."""
    lacking = () if MOMENTS[case.inner] else WITH_MOMENTS
    if wanted in lacking:
        raise NotMeasured(f"{wanted} reads the optimizer's moments, and {case.inner} has none")
    return [name for name in METHODS if wanted in (None, name) and name not in lacking]


def case_of(parameters: int | None, cases: Sequence[Case] = CASES) -> Case:
    """Return the case of about this many parameters, by default the smallest."""
    if parameters is None:
        return cases[0]
    near = min(cases, key=lambda case: abs(case.model.parameters() - parameters))
    if not 0.9 < near.model.parameters() / parameters < 1.1:
        sizes = ", ".join(size_name(case.model.parameters()) for case in cases)
        raise NotMeasured(f"this is measured with one of {sizes} parameters")
    return near


def _options(method: str) -> dict[str, str | int | float]:
    return {**METHODS[method], "period": 1, "deadline_s": DEADLINE_S}


def _settings(case: Case, method: str, base: str, number: int, **others: Any) -> Settings:  # noqa: ANN401
    shared = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    fields = {"peers": PEERS, "folder": str(Path(base, str(number))), **shared, **others}
    return Settings(number=number, method=method, options=_options(method), **fields)


def _peers(case: Case, method: str) -> list[list[Fields]]:
    """Run both processes to their end; return the lines of each."""
    with tempfile.TemporaryDirectory(prefix="farflock-whole-") as base, ExitStack() as running:
        invite, begun = None, []
        for number in range(PEERS):
            settings = _settings(case, method, base, number, invite=invite)
            peer = running.enter_context(_Peer(settings))
            begun.append(peer)
            invite = peer.hear("joined")["invite"]
        lines = [peer.rest() for peer in begun]
    require_rounds(lines)
    return lines


def _join(metric: str, case: Case, method: str) -> Metric:
    """Let a process join another one after a round that it took alone."""
    with tempfile.TemporaryDirectory(prefix="farflock-whole-") as base, ExitStack() as running:
        settings = _settings(case, method, base, 0, peers=1, rounds=1, invite=None, stays=True)
        founder = running.enter_context(_Peer(settings))
        invite = founder.hear("joined")["invite"]
        founder.hear("round")
        settings = _settings(case, method, base, 1, rounds=0, invite=invite)
        joiner = running.enter_context(_Peer(settings))
        seconds = joiner.hear("joined")["seconds"]
        joined = joiner.hear("done")
    needed = needed_bytes(case, method)
    allowed = needed["weights"] + needed["state"] + ALLOWED_BYTES
    highest = joined["begun_bytes"]
    note = f"weights {needed['weights'] / 1e6:,.0f} MB, state {needed['state'] / 1e6:,.0f} MB"
    note += f"; in after {seconds:.1f} s"
    return Metric(metric, highest, allowed, round(highest / allowed, 4), 1, load(), "bytes", note)


class _Peer:
    """A process of the run."""

    def __init__(self, settings: Settings) -> None:
        command = [sys.executable, "-m", WORKER]
        self._number = settings.number
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings).decode() + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> "_Peer":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lines.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def hear(self, kind: str) -> Fields:
        """Return the next line, which must be of this kind."""
        line = self._lines.readline()
        if not line:
            raise NotMeasured(f"process {self._number} ended early; see its last lines")
        fields: Fields = json.loads(line)
        assert fields["kind"] == kind, f"expected {kind}, got {fields}"
        return fields

    def rest(self) -> list[Fields]:
        """Return all lines until its end."""
        return [json.loads(line) for line in self._lines]

    @property
    def _lines(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


def require_rounds(lines: list[list[Fields]]) -> None:
    """Raise `NotMeasured` unless all rounds were complete, and both ended with the same state."""
    ended = [own[-1]["kind"] == "done" for own in lines if own]
    statuses = {(one["status"], one["peers"]) for own in lines for one in own[:-1]}
    if ended != [True] * PEERS or statuses != {("ok", PEERS)}:
        raise NotMeasured(f"a process ended early, or a round was not complete: {lines}")
    if len({own[-1]["state"] for own in lines}) != 1:
        raise NotMeasured("the processes ended with different states")


def needed_bytes(case: Case, method: str) -> dict[str, float]:
    """Return what a process must hold, by its name."""
    plan = _plan(case, method)
    count, width = case.model.parameters(), WIDTHS[case.dtype]
    (stream,) = stream_sizes(plan)
    payloads = float(PEERS * stream.out_bytes)
    if stream.kind == "mean":  # its own, its share of the others', and the result
        payloads = stream.out_bytes + stream.out_bytes * (PEERS - 1) / PEERS + stream.back_bytes
    return {
        "weights": count * width,
        "gradients": count * width,
        "moments": count * width * MOMENTS[case.inner],
        "state": state_bytes(plan) if case.outer == "host" else 0,
        "residuals": stream.residual_bytes / PEERS,
        "payloads": payloads,
    }


def _plan(case: Case, method: str) -> RunPlan:
    return dataclasses.replace(
        plan_of("demo", 1, case.seq, method, **_options(method)), model=case.model
    )


def _memory(metric: str, case: Case, method: str, peers: list[list[Fields]]) -> Metric:
    needed = needed_bytes(case, method)
    allowed = sum(needed.values()) + (ALLOWED_SHARE - 1) * needed["payloads"] + ALLOWED_BYTES
    begun = max(own[-1]["begun_bytes"] for own in peers)
    rounds = max(one["peak_bytes"] for own in peers for one in own[:-1])
    note = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in needed.items())
    note = f"{begun / 1e6:,.0f} MB until both are members; needed in a round: {note}"
    highest = max(begun, rounds)
    return Metric(metric, highest, allowed, round(highest / allowed, 4), 1, load(), "bytes", note)


def _time(metric: str, peers: list[list[Fields]]) -> Metric:
    rounds = [one for own in peers for one in own[:-1]]
    median = {
        name: statistics.median(one[name] for one in rounds)
        for name in ("round_cpu_s", "step_cpu_s", "round_s")
    }
    value, yardstick = median["round_cpu_s"], median["step_cpu_s"]
    note = f"{median['round_s']:.1f} s of wall time a round, both processes on this machine"
    ratio = round(value / yardstick, 2)
    return Metric(metric, value, yardstick, ratio, len(rounds), load(), "s", note)
