"""A trainer's allowance of microbatches that no round has named yet, so that rounds take in little
more than their batch.

A round names what its group has merged when it begins. Microbatches that come back while it is
agreed on go into the next round, so rounds would grow where an agreement takes longer than a batch.
No trainer knows what the others have in flight, but all of them see the size of each round. So each
adapts its own number, by additive increase and multiplicative decrease, which leads to fair shares
(Chiu and Jain, Computer Networks and ISDN Systems 17, 1989).

Where servers take gradients of old weights, a microbatch may also come back too late to count,
because of the rounds of those begun before it. Then, too, too many are out. Sans I/O."""

from dataclasses import dataclass

ROUND_TIMEOUT_S = 3.0  # without a round, before the allowance doubles: other trainers may have gone
TIMEOUT_ROUNDS = 2.0  # the same for long rounds, in times between the last two
# Times its batch, the size up to which a round is no reason to hold microbatches back: some come
# in until all servers know that the batch is full.
TOLERANCE = 2.0
LARGE_FACTOR = 0.65  # after a larger round, of the allowance that would have kept to that size
LATE_FACTOR = 0.8  # of the allowance, once one of its microbatches came too late
# Added with each round from then on, instead of 1: whether a microbatch is late shows only several
# rounds after it set out, and those that follow it until then are late, too.
CAREFUL = 0.25


@dataclass(slots=True)
class Allowance:
    """The microbatches of one trainer that may wait for a round to name them: at first `limit`.
    A round should name `batch` of all trainers together."""

    batch: int
    limit: float
    _short_s: float | None = None  # since when the limit has held microbatches back
    _was_short: bool = False  # since the last round
    _named_s: float | None = None  # when the last round was named
    _apart_s: float = 0.0  # time between the last two rounds
    _rise: float = 1.0  # of the limit, with each round, while it holds microbatches back
    _lowered_s: float = 0.0  # when a late microbatch last lowered the limit

    def __post_init__(self) -> None:
        if self.batch < 1 or self.limit < 1:
            raise ValueError(
                f"an allowance of {self.limit} microbatches for rounds of {self.batch}; "
                "both must be at least 1"
            )

    def has_room(self, unnamed: int, now_s: float) -> bool:
        """True if one more microbatch may begin beside those that no round has named."""
        if unnamed < self.limit:
            return True
        if self._short_s is None:
            self._short_s, self._was_short = now_s, True
        if now_s - self._short_s < max(ROUND_TIMEOUT_S, TIMEOUT_ROUNDS * self._apart_s):
            return False
        # the others' shares may be missing, so that no round has its batch
        self.limit, self._short_s = 2.0 * unnamed, None
        return unnamed < self.limit

    def named(self, size: int, now_s: float) -> None:
        """Note a round that names so many microbatches, of all trainers."""
        if size > TOLERANCE * self.batch:
            fitting = self.limit * TOLERANCE * self.batch / size
            self.limit = max(fitting * LARGE_FACTOR, 1.0)
        elif self._was_short:
            self.limit += self._rise
        if self._named_s is not None:
            self._apart_s = now_s - self._named_s
        self._named_s, self._short_s, self._was_short = now_s, None, False

    def late(self, begun_s: float, now_s: float) -> None:
        """Note a microbatch, begun at `begun_s`, that came too late to count. Those that set out
        before the limit was last lowered for one say nothing about the new limit."""
        if begun_s >= self._lowered_s:
            self.limit, self._lowered_s = max(self.limit * LATE_FACTOR, 1.0), now_s
            self._rise = CAREFUL
