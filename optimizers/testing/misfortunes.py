"""Misfortunes under which the laws of methods are checked: lost, late and partial results, failed
rounds, slow, sleeping, joining and leaving peers.
"""

from collections.abc import Callable

from farflock.optimizers.method import Ranges
from farflock.optimizers.testing.loopback import Loopback, nothing, whole

TICKS = 20  # steps with misfortune


# Each changes a swarm whose last peer is its victim.


def tail_of(what: str, n: int) -> Ranges:
    """Return the ranges if all but the first two values were taken."""
    return [(min(2, n - 1), n)]


def second_half_of(what: str, n: int) -> Ranges:
    """Return the ranges if the second half of a tensor, or nothing of a bias, was taken."""
    return [] if what.endswith("bias") else [(max(n // 2, 1), n)]


def _dropped(swarm: Loopback, victim: str, tick: int = 0) -> None:
    swarm.taken = lambda peer, number: nothing if peer == victim and number % 3 == 1 else whole


def _partly(swarm: Loopback, victim: str, tick: int) -> None:
    swarm.taken = lambda peer, number: tail_of if peer == victim and number % 3 != 2 else whole


def _delayed(swarm: Loopback, victim: str, tick: int) -> None:
    swarm.late = lambda peer, number: 1 if number % 2 else 0


def late(swarm: Loopback, victim: str, tick: int = 0) -> None:
    """Delay the victim's results by 0, 2, 4 or 6 steps."""
    swarm.late = lambda peer, number: (number % 4) * 2 if peer == victim else 0


def _failing(swarm: Loopback, victim: str, tick: int) -> None:
    swarm.fails = lambda number: number % 3 == 1


def _slow(swarm: Loopback, victim: str, tick: int) -> None:
    swarm.rests = lambda peer, tick: peer == victim and tick % 3 != 0


def _joins(swarm: Loopback, victim: str, tick: int) -> None:
    if tick == 8:
        swarm.join("z", "a")


def _leaves(swarm: Loopback, victim: str, tick: int) -> None:
    if tick == 8 and len(swarm.peers) > 1:
        swarm.leave(victim)


def _sleeps(swarm: Loopback, victim: str, tick: int) -> None:
    if len(swarm.peers) > 1:
        swarm.peers[victim].asleep = 5 <= tick < 14


def _everything(swarm: Loopback, victim: str, tick: int) -> None:
    _dropped(swarm, victim)
    late(swarm, "a")
    swarm.fails = lambda number: number % 5 == 3
    _joins(swarm, victim, tick)


FATES: dict[str, Callable[[Loopback, str, int], None]] = {  # called before each tick
    "calm": lambda swarm, victim, tick: None,
    "drop": _dropped,
    "partial": _partly,
    "delay": _delayed,
    "late": late,
    "fail": _failing,
    "slow": _slow,
    "join": _joins,
    "leave": _leaves,
    "sleep": _sleeps,
    "everything": _everything,
}
DAILY_FATES = ("late", "sleep", "everything")


def play(swarm: Loopback, fate: str, ticks: int = TICKS) -> Loopback:
    """Run a swarm through this many ticks of a fate; its last peer is the victim."""
    victim = list(swarm.peers)[-1]
    for tick in range(ticks):
        FATES[fate](swarm, victim, tick)
        swarm.steps(1)
    return swarm
