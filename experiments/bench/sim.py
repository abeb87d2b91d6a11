"""The cost of the simulator: training steps of a whole simulated swarm per processor second.

The yardstick is a plain loop that trains the same number of replicas in turn; `sim.peer_s` is the
cost of each further peer in a run that ends at once. The swarm is that of
`node/simulate/simulation.py`: real steps, and the product's own agreement, links, codecs and states
in virtual time.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from farflock.experiments.bench.workers.bare import Bare, plan_of
from farflock.experiments.measure.metric import Metric, Options, load, medians, seconds
from farflock.experiments.measure.threads import one_thread
from farflock.node.data.samples import Text, text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.simulate.simulation import SimulationResult, World, simulate
from farflock.node.tokens.tokenizer import ByteTokenizer


@dataclass(frozen=True, slots=True)
class Size:
    """The training swarm, and the peers of two swarms whose start-up costs are compared."""

    preset: str = "demo"
    batch: int = 8
    seq: int = 64
    peers: int = 4
    period: int = 10
    steps: int = 30
    few: int = 2
    many: int = 18

    @property
    def swarm_tokens(self) -> int:
        """Tokens of a run whose peers take `steps` each."""
        return self.steps * self.peers * self.batch * self.seq


TEXT = 100_000  # bytes
QUICK = Size("tiny", 2, 16, 2, 3, 6, 1, 3)


def run(options: Options) -> Iterator[Metric]:
    """Yield `sim` and `sim.peer_s`."""
    size = QUICK if options.quick else Size()
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train[:TEXT]))
    with one_thread():
        if options.wants("sim"):
            yield _steps(size, tokens, options.repeats)
        if options.wants("sim.peer_s"):
            yield peer_metric(size, tokens, options.repeats)


def _steps(size: Size, tokens: Text, repeats: int) -> Metric:
    """Measure the steps of the swarm and of the plain loop; the first turn warms up."""
    pairs = [simulated_turn(size, tokens) for _ in range(1 + repeats)][1:]
    value, yardstick, ratio = medians(pairs)
    note = (
        f"{size.peers} peers, {size.preset} model, batch {size.batch} x {size.seq}, "
        f"DiLoCo with rounds of {size.period} steps, about {size.steps} steps per replica, "
        "start and end of the run included"
    )
    return Metric(
        "sim", value, yardstick, ratio, len(pairs), load(), "steps a processor second", note
    )


def simulated_turn(size: Size, tokens: Text) -> tuple[float, float]:
    """Return the steps per processor second of the swarm, and of the plain loop."""
    begin_s = time.process_time()
    steps = _simulated(size, tokens, size.peers, size.swarm_tokens).steps
    swarm_s = time.process_time() - begin_s
    plan = plan_of(size.preset, size.batch, size.seq, "local")
    replicas = [Bare(plan, tokens, str(number)) for number in range(size.peers)]

    def plain() -> None:
        for step in range(steps):
            replicas[step % size.peers].train(1)

    return steps / swarm_s, steps / seconds(plain, time.process_time)


def peer_metric(size: Size, tokens: Text, repeats: int) -> Metric:
    """Measure the cost of a peer in a run that ends at once.

    That is a download, an admission, a step of one token, and 30 virtual seconds.
    """
    size = replace(size, batch=1, seq=1)
    each_s = []
    for _ in range(1 + repeats):
        few_s, many_s = (
            seconds(lambda count=count: _simulated(size, tokens, count, 1), time.process_time)  # type: ignore[misc]
            for count in (size.few, size.many)
        )
        each_s.append((many_s - few_s) / (size.many - size.few))
    value, _, _ = medians([(each, 1.0) for each in each_s[1:]])
    note = (
        f"a run of {size.many} peers minus one of {size.few}, {size.preset} model: "
        "download of the state, admission, one step of one token, 30 virtual seconds of life"
    )
    return Metric("sim.peer_s", value, None, None, repeats, load(), "processor seconds", note)


def _simulated(size: Size, tokens: Text, peers: int, total_tokens: int) -> SimulationResult:
    plan = plan_of(size.preset, size.batch, size.seq, "diloco", period=size.period)
    return simulate(plan, World(peers, total_tokens), tokens)
