"""What the rounds of all stages have named of one trainer's microbatches, so that one which is named twice is noticed."""

from collections.abc import Iterable

from farflock.swarm.links import PeerId
from farflock.swarm.protocol.staging import Key

REMEMBERED = 4096  # numbers named, of each stage


class Heard:
    """Of trainer `me`, who is in a full replica or walks the stages of others."""

    def __init__(self, me: PeerId, stages: int) -> None:
        self._me = me
        self._named: list[set[int]] = [set() for _ in range(stages)]
        self.doubled = 0  # named twice at one stage, which must not be

    def of_round(self, stage: int, keys: Iterable[Key]) -> list[int]:
        """The numbers of mine that a round of this stage names."""
        mine, named = [number for trainer, number in keys if trainer == self._me], self._named[stage]
        self.doubled += len(named.intersection(mine))
        named.update(mine)
        if len(named) > 2 * REMEMBERED:
            self._named[stage] = set(sorted(named)[-REMEMBERED:])
        return mine
