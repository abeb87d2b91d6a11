"""EDiT and A-EDiT: local SGD whose pseudo-gradients are judged layer by layer before they count
(Cheng et al., arXiv:2412.07210, section 3; equations as in its released code, atorch's local_sgd).
For each layer of the model:

    G_m = |D_m|;  z_m = (G_m - mu) / sigma
    w_m = softmax_m(-G_m / T), 0 where z_m > 3·max(1, std of recent z)
    D' = sum w_m·D_m;  D' <- D'·min(1, clip / (|D'| + 1e-6));  phi, u <- outer step
    if all are rejected, the layer stays

A round has two phases: all norms are gathered, then comes the mean of the pseudo-gradients, scaled
by what all peers know from the norms. All peers use the norms as sent, so that rounding at the
sender does not matter. A peer that missed the first phase takes part in the second with zeros of
negligible weight, so that no peer waits for it.

Deviations: mu and sigma are replicated and follow all peers' norms at once; mu starts at the first
norms; z is computed before its norm enters; a rejected norm enters as the largest that would have
passed, so that one outlier does not admit the next, and a lasting change is accepted after a while;
"recent" is the same moving average; weights are whole numbers of 2**-30. A-EDiT (`round_s`) uses
run time, and `min_steps` of this peer instead of all peers' steps. There is no synchronous warm-up.
Where norms failed, the mean is a plain one; where a shard of a mean lacks a participant, the others
replace it, by the weights of the whole.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.contrib.anomaly import HUGE, UNIT, AnomalyFilter
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    MemberId,
    Progress,
    Replica,
    Result,
    State,
)
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.layers import layers_of
from farflock.optimizers.parts.norms import norm_of
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import Outer, OuterNesterov, scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.state import (
    Shapes,
    WrongState,
    copies,
    counter,
    kept,
    named,
    numbers,
    unnamed,
    zeros,
)
from farflock.optimizers.parts.state_fields import Kind, nested, own, saved, shared
from farflock.optimizers.parts.stateful import OuterMethod
from farflock.optimizers.parts.sync_schedule import SyncSchedule
from farflock.optimizers.trial_options import Disaster, TrialOptions

NORMS, DELTA = "norms", "delta"
# A layer stays as it is if less than 1/64 of its weight arrived: the step would be mostly rounding.
FAINTEST = 64
ONLOOKER = 2.0**-60  # the weight of a peer without a contribution: it vanishes next to a 1


LayerWeights = dict[int, dict[MemberId, list[int]]]
Early = dict[int, tuple[tuple[MemberId, ...], dict[str, Tensor]]]


def _statistics(prefix: str, state: State, shapes: Shapes) -> Tensor:
    stats = unnamed(prefix, state, {"stats": (len(layers_of(shapes)), 4)})["stats"].clone()
    if float(stats[:, 1::2].min()) < 0:
        raise WrongState(f"{prefix}.stats must be variances of 0 or more; ask another member")
    return stats


def _packed(prefix: str, entries: dict[MemberId, Tensor]) -> State:
    """Return entries by peer under a prefix, and their number, so that a missing one is noticed."""
    return {prefix: torch.tensor(len(entries)), **named(prefix, entries)}


def _unpacked(prefix: str, state: State) -> dict[MemberId, Tensor]:
    found = {
        name[len(prefix) + 1 :]: x.clone()
        for name, x in state.items()
        if name.startswith(f"{prefix}.")
    }
    if len(found) != counter(prefix, state):
        raise WrongState(
            f"{prefix} must be the number of its entries, {len(found)}; ask another member"
        )
    return found


def _packed_weights(weights: LayerWeights) -> State:
    state: State = {}
    for number, rows in weights.items():
        state |= _packed(f"weights.{number}", {who: torch.tensor(row) for who, row in rows.items()})
    return state


def _unpacked_weights(key: str, state: State, shapes: Shapes) -> LayerWeights:
    """Return the weights of all rounds whose norms are known and whose mean is not in phi yet."""
    after, before, layers = (
        counter("round", state),
        counter("delta_round", state),
        len(layers_of(shapes)),
    )
    if before > after:
        raise WrongState(
            f"delta_round must be at most round, {after}, got {before}; ask another member"
        )
    weights: LayerWeights = {}
    for number in range(before, after):
        rows = _unpacked(f"{key}.{number}", state)
        for who, row in rows.items():
            if (
                row.dtype != torch.int64
                or row.shape != (layers,)
                or not bool(((row >= 0) & (row <= UNIT)).all())
            ):
                raise WrongState(
                    f"{key}.{number}.{who} must be {layers} whole numbers up to {UNIT}; "
                    "ask another member"
                )
        weights[number] = {who: row.tolist() for who, row in rows.items()}
    return weights


def _packed_early(key: str, early: Early) -> State:
    state = numbers({key: len(early)})
    for number, (workers, mean) in early.items():
        state |= _packed(f"{key}.{number}", {who: torch.tensor(1) for who in workers}) | named(
            f"mean.{number}", mean
        )
    return state


def _unpacked_early(key: str, state: State, shapes: Shapes) -> Early:
    rounds = {name.split(".")[1] for name in state if name.startswith(f"{key}.")}
    early: Early = {}
    for number in sorted(int(name) for name in rounds if name.isdecimal()):
        each = f"{key}.{number}"
        workers = tuple(who for who in _unpacked(each, state) if counter(f"{each}.{who}", state))
        early[number] = (workers, copies(kept(f"mean.{number}", state, shapes)))
    if len(early) != counter(key, state) or any(
        bool(workers) != bool(mean) for workers, mean in early.values()
    ):
        raise WrongState(
            f"{key} must be a count, got another than {len(early)} means; ask another member"
        )
    return early


STATISTICS = Kind(lambda prefix, stats: named(prefix, {"stats": stats}), _statistics)
WEIGHTS = Kind(lambda key, weights: _packed_weights(weights), _unpacked_weights)
EARLY = Kind(_packed_early, _unpacked_early)


@dataclass(slots=True)
class EDiT(OuterMethod):
    """Rounds of `period` local steps; with `round_s` a round ends when run time crosses a multiple
    of it.

    `temperature` None weighs all equally, `relative` divides norms by their mean before the
    softmax, `threshold` None accepts every peer, `clip` None clips nothing, `step_ratio` is the
    share of a weight that follows the number of steps.
    """

    period: int = 128
    outer: Outer = field(default_factory=lambda: OuterNesterov(0.7, 0.8))
    temperature: float | None = 1.0
    relative: bool = False
    threshold: float | None = 3.0
    warmup: int = 120
    alpha: float = 0.02
    clip: float | None = 10.0
    round_s: float | None = None
    min_steps: int = 1
    step_ratio: float = 0.0
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"warmup": 2},
        rest=6,
        disasters=(
            Disaster({"period": 4, "warmup": 2, "codec": "fp32", "return_codec": "fp32"}, 6),
            Disaster({"round_s": 2.0, "warmup": 2, "codec": "fp32", "return_codec": "fp32"}, 19),
        ),
    )
    _state: OuterState = nested(OuterState)
    _stats: Tensor = shared(
        lambda: torch.zeros(0, 4, dtype=torch.float32), "layers", STATISTICS
    )  # a row for each layer
    _seen: int = shared(0)  # rounds whose norms are in `_stats`
    _round: int = shared(0)  # the next round of norms
    _delta_round: int = shared(0)  # the next round of means
    _weights: LayerWeights = shared(dict, kind=WEIGHTS)  # while the mean is open; {}: no norms
    _early: Early = shared(dict, kind=EARLY)  # means without norms
    _since: int = own(0)  # steps since norms were taken
    _steps: int = own(0, stays=True)  # steps in work that was not taken yet
    _slot: int = own(0, stays=True)  # of the last message (see `SyncSchedule`)
    _start: dict[str, Tensor] = own(dict)  # where the replica stood when its norms were taken

    def __post_init__(self) -> None:
        require_options(self, "EDiT has no feedback; choose fp16, bf16 or int8")
        limits = {"temperature": 1.0, "threshold": 3.0, "clip": 10.0}
        for option, usual in limits.items():
            value = getattr(self, option)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"{option}={value} must be finite and above 0, usually {usual:g}, or left out"
                )
        if self.warmup < 0 or self.min_steps < 1:
            raise ValueError(
                f"warmup={self.warmup} must be 0 or more (120), min_steps={self.min_steps} 1 or "
                "more (1)"
            )
        if not 0 < self.alpha < 1 or not 0 <= self.step_ratio <= 1:
            raise ValueError(
                f"alpha={self.alpha} lies in (0, 1) (0.02), step_ratio={self.step_ratio} in [0, "
                "1] (0.5)"
            )

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return templates of the gathered norms and of the scaled pseudo-gradients."""
        norms = [0.0] * len(layers_of(replica.names))
        return [self._norms_exchange(norms, 0), self._delta_exchange(zeros(replica.shapes), 1.0)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update; the first one records where the round began."""
        self.begin(replica)
        self._slot = self._slot or self._sync_schedule.slot(progress)
        replica.inner_step()
        self._since += 1
        self._steps += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the norms when a round is over and nothing of the last one is open."""
        sync_schedule = self._sync_schedule
        open_round = self._start or self._round != self._delta_round
        if open_round or not sync_schedule.over(self._since, self._slot, progress):
            return []
        self._slot = sync_schedule.slot(progress)
        self._start, self._since = dict(replica.read(replica.names, "param")), 0
        phi, start = self._state.phi, self._start
        norms = [
            norm_of([phi[name] - start[name] for name in names])
            for names in layers_of(replica.names).values()
        ]
        return [self._norms_exchange(norms, self._steps)]

    @property
    def _sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.period, self.round_s, self.min_steps)

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Judge norms and ask for the mean, or make the outer step of a mean. Streams may run ahead
        of each other while rounds are replayed: a mean waits for its norms."""
        self.begin(replica)
        number = exchange.key.round
        if exchange.key.stream == NORMS:
            return self._take_norms(replica, exchange, result)
        workers = tuple(
            who
            for who, weight in zip(result.participants, result.weights, strict=True)
            if weight > ONLOOKER
        )
        mean = dict(result.mean or {}) if workers else {}
        if number >= self._round:
            self._early[number] = (workers, mean)
        else:
            self._delta_round = number  # a stage that begins anew has none of the rounds before
            self._move(replica, workers, mean, result)
            self._start = {} if exchange.tensors else self._start
        return []

    def _take_norms(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        number, failed = exchange.key.round, result.status == "failed"
        self._round, self._weights[number] = (
            result.next_round,
            {} if failed else self._weigh(replica, result),
        )
        if exchange.tensors and not failed and not result.taken:
            self._start = {}
        if number in self._early:  # decided without this peer, which keeps its work
            self._start = {} if exchange.tensors else self._start
            while self._delta_round < self._round and self._delta_round in self._early:
                self._move(replica, *self._early.pop(self._delta_round), None)
            return []
        if number != self._delta_round:
            return []  # an older mean is still missing; this one will be replayed
        return [self._message(replica, result)]

    def _weigh(self, replica: Replica, result: Result) -> dict[MemberId, list[int]]:
        """Return all peers' weights in each layer, and update the statistics."""
        assert result.gathered is not None
        judge = AnomalyFilter(
            self.temperature,
            self.relative,
            self.threshold,
            self.warmup,
            self.alpha,
            self.step_ratio,
        )
        peers = sorted(result.gathered)
        norms = [
            [x if 0 <= x < HUGE else HUGE for x in result.gathered[peer]["norms"].tolist()]
            for peer in peers
        ]
        steps = [min(max(float(result.gathered[peer]["steps"]), 0.0), HUGE) for peer in peers]
        weights: dict[MemberId, list[int]] = {peer: [] for peer in peers}
        stats = self._stats.tolist()
        for layer, mine in enumerate(zip(*norms, strict=True)):
            rejected, stats[layer] = judge.anomalies(list(mine), stats[layer], self._seen)
            for peer, weight in zip(peers, judge.weights(list(mine), steps, rejected), strict=True):
                weights[peer].append(weight)
        self._stats, self._seen = torch.tensor(stats, dtype=torch.float32), self._seen + 1
        return weights

    def _message(self, replica: Replica, norms: Result) -> Exchange:
        """Return the pseudo-gradient times weight / mean weight in each layer, so that a mean over
        all is the weighted one."""
        if not self._start:
            return self._delta_exchange(zeros(replica.shapes), ONLOOKER)
        weights = self._weights[self._delta_round]
        mine = weights[_whose(norms)] if weights else []
        tensors = {}
        for layer, names in enumerate(layers_of(replica.names).values()):
            total = sum(of_peer[layer] for of_peer in weights.values())
            factor = len(weights) * mine[layer] / total if total else 0.0 if weights else 1.0
            for name in names:
                work = self._state.phi[name] - self._start[name]
                tensors[name] = (
                    scaled(work, factor) if factor else torch.zeros_like(work)
                )  # as 0 times infinity is not 0
        return self._delta_exchange({name: tensors[name] for name in replica.names}, 1.0)

    def _move(
        self,
        replica: Replica,
        workers: tuple[MemberId, ...],
        mean: dict[str, Tensor],
        result: Result | None,
    ) -> None:
        """Make the outer step of the next round of means, by layer.

        `result` is None if the round was decided without this peer."""
        weights = self._weights.pop(self._delta_round, {})
        self._delta_round += 1
        if not mean:
            return
        theta = (
            replica.read(replica.names, "param") if self._start and result and result.taken else {}
        )
        moved = {}
        for layer, names in enumerate(layers_of(replica.names).values()):
            factor = self._factor(weights, workers, layer, [mean[name] for name in names])
            for name in names if factor is not None else ():
                after = self._state.phi[name]
                if factor:
                    step = scaled(mean[name], factor).to(after.device)  # an early mean: a state's
                    after = self._state.step(name, self.outer, step)
                if theta and result and name in result.taken:
                    since = after + (theta[name] - self._start[name]) if self._since else after
                    moved[name] = choose(result.taken[name], since, theta[name])
        if moved:
            self._steps = self._since
            replica.write(moved, "param")

    def _factor(
        self,
        weights: dict[MemberId, list[int]],
        workers: tuple[MemberId, ...],
        layer: int,
        mean: list[Tensor],
    ) -> float | None:
        """Return the factor that makes a layer's mean the weighted one of its participants,
        clipped. It is 0 if all of the layer's work was rejected, None if too little of the weight
        arrived."""
        total = sum(of_peer[layer] for of_peer in weights.values())
        arrived = sum(weights[peer][layer] for peer in workers if peer in weights)
        if weights and not total:
            return 0.0
        if weights and arrived * FAINTEST < total:
            return None
        factor = len(workers) * total / (len(weights) * arrived) if weights else 1.0
        return (
            factor
            if self.clip is None
            else factor * min(1.0, self.clip / (factor * norm_of(mean) + 1e-6))
        )

    def begun(self, replica: Replica) -> None:
        """Start with empty statistics for each layer, unless there are some."""
        if not self._stats.numel():
            self._stats = torch.zeros(len(layers_of(replica.names)), 4, dtype=torch.float32)

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return the norms' statistics, or the means' phi, momentum and next round's weights."""
        self.begin(replica)
        if stream == NORMS:
            return STATISTICS.write("layers", self._stats) | numbers(
                {"seen": self._seen, "round": self._round}
            )
        outer = saved(self._state, "shared") | numbers({"delta_round": self._delta_round})
        return outer | _packed_weights(
            {x: row for x, row in self._weights.items() if x == self._delta_round}
        )

    def _norms_exchange(self, norms: list[float], steps: int) -> Exchange:
        usable = [norm if norm < HUGE else HUGE for norm in norms]  # HUGE for NaN too
        tensors = {
            "norms": torch.tensor(usable, dtype=torch.float32),
            "steps": torch.tensor([float(steps)], dtype=torch.float32),
        }
        key = ExchangeKey(NORMS, self._round)
        return Exchange(
            key,
            "gather",
            All(),
            tensors,
            codec="fp32",
            return_codec="fp32",
            deadline_s=self.deadline_s,
        )

    def _delta_exchange(self, tensors: dict[str, Tensor], weight: float) -> Exchange:
        key, deadline_s = ExchangeKey(DELTA, self._delta_round), self.deadline_s
        return Exchange(
            key,
            "mean",
            All(),
            tensors,
            weight,
            self.codec,
            self.return_codec,
            deadline_s=deadline_s,
        )


def _whose(norms: Result) -> MemberId:
    """Return the sender of what this peer sent: itself, or a peer with equal norms and weights."""
    assert norms.gathered is not None
    assert norms.sent is not None
    sent = norms.sent
    return next(
        who
        for who, x in norms.gathered.items()
        if all(torch.equal(x[name], sent[name]) for name in sent)
    )
