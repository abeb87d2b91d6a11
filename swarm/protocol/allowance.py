"""A trainer's allowance of microbatches that no round has named yet, so that rounds take in little
more than their batch.

A round names what its group has merged when it begins. Microbatches that come back while it is
agreed on go into the next round, so rounds would grow where an agreement takes longer than a batch.
No trainer knows what the others have in flight, but all of them see the size of each round. So each
adapts its own number, by additive increase and multiplicative decrease, which leads to fair shares
(Chiu and Jain, Computer Networks and ISDN Systems 17, 1989). Sans I/O."""

from dataclasses import dataclass

ROUND_TIMEOUT_S = 3.0  # without a round, before the allowance doubles: other trainers may have gone
TIMEOUT_ROUNDS = 2.0  # the same for long rounds, in times between the last two
# Times its batch, the size up to which a round is no reason to hold microbatches back: some come
# in until all servers know that the batch is full.
TOLERANCE = 1.5


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
            self.limit = max(self.limit * self.batch / size, 1.0)
        elif self._was_short:
            self.limit += 1
        if self._named_s is not None:
            self._apart_s = now_s - self._named_s
        self._named_s, self._short_s, self._was_short = now_s, None, False
