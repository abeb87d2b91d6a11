"""A member that sleeps in its own code is waited for twice, and then not until it offers again."""

import pytest
from worlds.herd import STREAM, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.messages import Key
from farflock.swarm.protocol.latecomers import Latecomers
from farflock.swarm.protocol.views import Member, View

SLEEP_S = 120.0
KINDS = pytest.mark.parametrize("kind", ["mean", "gather"])


def after(herd, number):
    """The participants of the rounds after this one."""
    return [parts for at, (_, parts, _, _) in sorted(herd.results.items()) if at > number]


@KINDS
def test_the_others_keep_their_pace_while_one_sleeps_and_count_it_again_once_it_is_back(kind):
    @in_virtual_time(3, kind=kind)
    async def main(herd):
        mate, sleeper = herd.nodes[0], herd.nodes[1]
        await until(lambda: mate.applied >= 3, 60, "all three at their pace")
        began_s, first = now(), mate.applied
        await until(lambda: mate.applied >= first + 20, 60, "twenty rounds")
        round_s = (now() - began_s) / 20
        sleeper.quiet, began_s, first = True, now(), mate.applied
        await until(lambda: now() >= began_s + SLEEP_S, 2 * SLEEP_S, "its sleep")
        assert (mate.applied - first) * round_s >= 0.9 * SLEEP_S
        assert herd.nodes[1].id in mate.members, "its place stays"
        assert not any(sleeper.id in parts for parts in after(herd, first + 2))
        sleeper.quiet, first = False, mate.applied
        await until(lambda: mate.applied >= first + 20, 120, "rounds after its return")
        assert all(sleeper.id in parts for parts in after(herd, first + 15)), "waited for again"

    main()


@KINDS
def test_one_that_is_only_slower_is_waited_for_in_each_round(kind):
    @in_virtual_time(3, kind=kind)
    async def main(herd):
        mate, slow = herd.nodes[0], herd.nodes[1]
        await until(lambda: mate.applied >= 3, 60, "all three at their pace")
        step = slow.step

        async def slowly():
            slow.quiet = True
            began_s = now()
            await until(lambda: now() >= began_s + 2.0, 60, "its own work")
            slow.quiet = False
            await step()

        slow.step, first = slowly, mate.applied
        await until(lambda: mate.applied >= first + 10, 120, "ten rounds")
        assert all(slow.id in parts for parts in after(herd, first + 1))

    main()


def test_only_rounds_in_a_row_count_and_an_offer_ends_the_absence():
    view = View(1, bytes(32), 0, (Member("a", 1), Member("b", 1)))
    late = Latecomers(away := {})
    for number in (2, 6, 10):  # it brought something to the rounds between
        late.missed(view, Key(STREAM, number), ["b"], stride=2)
    assert not away
    late.missed(view, Key(STREAM, 12), ["b"], stride=2)
    assert [*away] == [("b", STREAM)]
    late.heard("b", STREAM)
    assert not away
    late.missed(view, Key(STREAM, 14), ["b"], stride=2)
    assert not away, "it begins anew"
