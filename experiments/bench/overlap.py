"""The cost of synchronisation that overlaps with training.

The metric is the tokens per second of two peers that train with Streaming DiLoCo over links of 100
and 10 Mbit/s, next to those of the same loop without any exchange (method `local`).

Both arms use the product's own loop, links, agreement, encryption and codecs, in two processes on
hosts with a limited rate (workers/netns.py; needs root). They take turns, piece by piece. A piece
lies between two fragments: its first step sends one, the mean is due `overlap` steps later,
and at its end nothing is in flight. So each piece contains one whole exchange with all its
computing, and none of it leaks into the other arm's time.

The training set-up decides the ratio: 1.2 million parameters in 3 fragments, each sent every 99
steps of 1,024 tokens, in the method's codecs (fp4 out, bf16 back), merged 5 steps later (the paper
advises at most 5). A fragment of 0.4 million parameters is 0.5 MB each way, 0.4 s on a link of
10 Mbit/s. The number of parameters hardly matters, since computing and sending both grow with it;
the tokens between two exchanges do. Large runs have more of them, and so a better ratio. With fewer
the ratio falls; a fragment that takes longer than its 5 steps is merged when it arrives, and the
loop waits only where the next one is to be sent.

`overlap.RATE.waiting` is the same with `overlap` 0: the loop waits for each fragment, as DiLoCo
waits for its whole replica. The difference between the two ratios is the gain from overlapping.
The remaining gap to 1 is work: where each peer has one core, encoding, hashing, encryption and
decoding take time from the steps. The note gives a worker's computing time with and without
exchanges.
"""

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields, Worker
from farflock.experiments.bench.workers.netns import Host, hosts
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load, medians
from farflock.node.model.llama import ModelConfig

WORKER = "farflock.experiments.bench.workers.overlap_peer"
RATES_BITS = (1e8, 1e7)
PEERS = 2
PIECE_TIMEOUT_S = 180.0
CODEC, RETURN_CODEC = "fp4", "bf16"
ARMS = ("local", "overlapping", "waiting")


@dataclass(frozen=True, slots=True)
class Size:
    """The model, a step's batch, and the steps between fragments and until a mean is due."""

    model: ModelConfig
    batch: int
    seq: int
    steps: int
    fragments: int
    overlap: int

    @property
    def tokens(self) -> int:
        """Tokens of a piece, all peers together."""
        return PEERS * self.steps * self.batch * self.seq

    def arm(self, name: str) -> dict[str, object]:
        """Return an arm's method and options, in the form that workers expect."""
        if name == "local":
            return {"name": name, "method": "local", "options": {}}
        options = {"period": self.steps * self.fragments, "fragments": self.fragments}
        options["overlap"] = self.overlap if name == "overlapping" else 0
        codecs = {"codec": CODEC, "return_codec": RETURN_CODEC}
        return {"name": name, "method": "streaming", "options": {**options, **codecs}}


FULL = Size(
    ModelConfig(dim=128, layers=6, heads=4, kv_heads=4, ffn_dim=344, context=64), 16, 64, 33, 3, 5
)
QUICK = Size(
    ModelConfig(dim=96, layers=2, heads=4, kv_heads=4, ffn_dim=256, context=64), 2, 32, 8, 2, 4
)


class NoOverlap(NotMeasured):
    """Raised if the peers exchanged nothing during a piece: there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One arm's piece: the seconds until the last worker was done, and a worker's mean CPU time."""

    took_s: float
    cpu_s: float


Turn = Mapping[str, Piece]


def run(options: Options) -> Iterator[Metric]:
    """Yield `overlap.RATE` and `overlap.RATE.waiting` for each rate in Mbit/s.

    Raise `NoHosts` if this machine cannot limit the rate.
    """
    size = QUICK if options.quick else FULL
    for rate_bits in (options.rate_bits,) if options.rate_bits else RATES_BITS:
        name = f"overlap.{rate_bits / 1e6:g}"
        if options.wants(name) or options.wants(f"{name}.waiting"):
            yield from measure(size, rate_bits, options.repeats, name)


def measure(size: Size, rate_bits: float, repeats: int, name: str) -> Iterator[Metric]:
    """Yield both metrics of one rate."""
    with hosts(PEERS, rate_bits) as places:
        timed = asyncio.run(turns(size, places, repeats))
    for arm, suffix in (("overlapping", ""), ("waiting", ".waiting")):
        yield metric_of(size, timed, arm, name + suffix)


def metric_of(size: Size, timed: Sequence[Turn], arm: str, name: str) -> Metric:
    """Compare an arm's tokens per second, turn by turn, with the loop without exchanges."""
    pairs = [(size.tokens / turn[arm].took_s, size.tokens / turn["local"].took_s) for turn in timed]
    value, yardstick, ratio = medians(pairs)
    own, plain = (
        statistics.median(turn[which].cpu_s for turn in timed) for which in (arm, "local")
    )
    merged = size.overlap if arm == "overlapping" else 0
    note = (
        f"{size.model.parameters() / 1e6:.1f}M parameters, {size.fragments} fragments, "
        f"one every {size.steps} steps of {size.batch * size.seq} tokens, "
        f"{CODEC} out and {RETURN_CODEC} back, merged {merged} steps later; "
        f"{own:.2f} s of computing per piece and worker, {plain:.2f} s without exchanges"
    )
    return Metric(name, value, yardstick, ratio, len(timed), load(), "tokens/s", note)


async def turns(
    size: Size, places: Sequence[Host], repeats: int, device: str = "cpu"
) -> list[Turn]:
    """Train all arms in turns, piece by piece, after the steps before the first fragment; all on
    one device."""
    arms = [size.arm(name) for name in ARMS]
    settings = {
        "model": size.model,
        "batch": size.batch,
        "seq": size.seq,
        "arms": arms,
        "device": device,
    }
    async with fleet.fleet(WORKER, places, settings) as workers:
        for _ in arms:
            await fleet.introduce(workers)
        for name in ARMS:
            await _piece(workers, name, size.steps - 1, 0)
        return [
            {name: await _piece(workers, name, size.steps, int(name != "local")) for name in ARMS}
            for _ in range(repeats)
        ]


async def _piece(workers: Sequence[Worker], arm: str, steps: int, exchanges: int) -> Piece:
    """Take `steps` steps on all workers, from the barrier until each is done."""
    _, answers = await fleet.together(workers, "train", PIECE_TIMEOUT_S, arm=arm, steps=steps)
    require_exchanges(arm, answers, exchanges)
    return Piece(
        max(answer["took_s"] for answer in answers),
        statistics.mean(answer["cpu_s"] for answer in answers),
    )


def require_exchanges(arm: str, answers: Sequence[Fields], wanted: int) -> None:
    """Raise `NoOverlap` unless a piece had the wanted exchanges, each with all workers."""
    seen = [[tuple(result) for result in answer["rounds"]] for answer in answers]
    if seen != [[("ok", len(answers))] * wanted] * len(answers):
        raise NoOverlap(
            f"a piece of {arm} needs {wanted} exchanges of all {len(answers)} workers, "
            f"but had {seen}"
        )
