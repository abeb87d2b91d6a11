"""A process of the benchmark of whole runs: `SwarmOptimizer` around a Llama model.

`python -m farflock.experiments.bench.workers.whole_peer` reads its settings from the first line of
standard input: they may hold an invite, which a command line would show to all users. It prints one
JSON line with its invite, one for each round, and one with its highest memory.
"""

import re
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import torch
from torch import Tensor

from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.model.llama import Llama, ModelConfig, build, next_token_loss
from farflock.optimizers.parts.state import state_hash

SEED = 20_261_123
LOOK_EVERY_S = 0.01
MEMBERS_TIMEOUT_S = 1800.0
RATE = 1e-4
STATUS = Path("/proc/self/status")


class Settings(msgspec.Struct, frozen=True):
    """The owner's settings; `invite` is None for the founder."""

    number: int
    peers: int
    model: ModelConfig
    dtype: Literal["float32", "bfloat16"]
    inner: Literal["sgd", "adamw"]
    outer: Literal["host", "disk"]
    seq: int
    rounds: int
    method: str
    options: dict[str, str | int | float]
    folder: str
    invite: str | None
    stays: bool = False  # after its rounds, until its input ends


class AnonymousPeak:
    """The highest anonymous memory of this process while the block runs: the kernel keeps none."""

    def __init__(self) -> None:
        self.highest_bytes = 0
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="memory", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._looking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._ended.set()
        self._looking.join()

    def since_last(self) -> int:
        """Return the highest since this was asked last."""
        highest, self.highest_bytes = max(self.highest_bytes, anonymous_bytes()), 0
        return highest

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self.highest_bytes = max(self.highest_bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return this process's anonymous memory that is resident: no files, no shared memory."""
    match = re.search(r"^RssAnon:\s*(\d+) kB$", STATUS.read_text(), re.M)
    assert match is not None, f"{STATUS} has no RssAnon"
    return int(match[1]) * 1024


def tokens_of(settings: Settings) -> Tensor:
    """Return a batch of one sequence and the token after it, other ones for each peer."""
    chance = torch.Generator().manual_seed(SEED + settings.number)
    return torch.randint(settings.model.vocab_size, (1, settings.seq + 1), generator=chance)


def train(model: Llama, optimizer: SwarmOptimizer, settings: Settings, peak: AnonymousPeak) -> None:
    """Take a step for each round, and print what it took."""
    tokens = tokens_of(settings)
    for number in range(settings.rounds):
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        trained_s, trained_cpu_s = time.monotonic(), time.process_time()
        optimizer.step()
        optimizer.zero_grad()
        ended_s, ended_cpu_s = time.monotonic(), time.process_time()
        done = optimizer.last_round
        say(
            kind="round",
            number=number,
            status=None if done is None else done.status,
            peers=None if done is None else done.peers,
            loss=loss.item(),
            step_s=trained_s - begin_s,
            step_cpu_s=trained_cpu_s - begin_cpu_s,
            round_s=ended_s - trained_s,
            round_cpu_s=ended_cpu_s - trained_cpu_s,
            peak_bytes=peak.since_last(),
        )


def say(**fields: object) -> None:
    """Print one JSON line."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()


def main(settings: Settings) -> None:
    """Train and exchange, and print what it took."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, settings.dtype))
    model = build(settings.model, SEED)
    torch.set_default_dtype(torch.float32)
    begin_s = time.monotonic()
    joined: dict[str, Any] = {**settings.options, "outer_state": settings.outer}
    with (
        AnonymousPeak() as peak,
        SwarmOptimizer(
            model,
            settings.method,
            settings.invite,
            inner=settings.inner,
            lr=RATE,
            folder=Path(settings.folder),
            tokens_per_step=settings.seq,
            **joined,
        ) as optimizer,
    ):
        say(kind="joined", invite=optimizer.invite, seconds=time.monotonic() - begin_s)
        optimizer.wait_for_members(settings.peers, MEMBERS_TIMEOUT_S)
        begun_bytes = peak.since_last()
        train(model, optimizer, settings, peak)
        if settings.stays:
            sys.stdin.read()
        say(kind="done", begun_bytes=begun_bytes, state=state_hash(optimizer.eval_params()).hex())


if __name__ == "__main__":
    main(msgspec.json.decode(sys.stdin.readline(), type=Settings))
