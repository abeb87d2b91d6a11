"""Newcomers on slow lines come in while rounds go on, and cost the others next to nothing."""

import asyncio
import collections

import pytest
import torch
from worlds.peers import identity, logged, peer_in, record_of
from worlds.waiting import now, until

from farflock.node.assembly.core import Core
from farflock.node.simulate.chaos_methods import ChaosCase, CountingTask
from farflock.node.state import spool
from farflock.node.train import state_sync
from farflock.node.train.driver import Driver
from farflock.node.train.ending import drop
from farflock.node.train.state_sync import COMMON_S
from farflock.swarm.compute import inline
from farflock.swarm.peer import absences, round_log
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.protocol.state_readers import READS_S
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel

VALUES = 400_000
STATE_BYTES = 4 * VALUES  # its momentum has equal chunks, which are fetched once
ROUND_BYTES = VALUES  # in int8
LINE = 200_000.0
ALONE_S = STATE_BYTES / LINE
PERIOD = 4
MEMBERS = 3


class Village:
    """Peers with whole models of one large tensor, without a model: a step takes its time only."""

    def __init__(self, step_s, method="diloco", **options):
        codecs = {"codec": "int8"} | ({"return_codec": "int8"} if method == "diloco" else {})
        options = {"period": PERIOD, "deadline_s": 60.0} | codecs | options
        self.arm = ChaosCase(method, options, step_s, {"a": VALUES})
        self.network, self.cores, self.peers, self.tasks = SimNetwork(1), {}, {}, []
        self.rounds = collections.defaultdict(list)  # by peer: when, which, and who was in it
        self.heard = collections.defaultdict(list)  # by newcomer: verified bytes
        self.member_s, self.downloaded_s = {}, {}
        self.held_s = {}  # by peer: how much longer its next step takes

    def peer(self, number, link=None):
        if link is not None:
            self.network.set_link(identity(number).peer, link)
        terms = RunTerms("run", 3, view_s=3.0)
        peer = self.peers[number] = peer_in(self.network, identity(number), terms)

        async def train(work):
            loss = work()
            await asyncio.sleep(self.arm.step_s + self.held_s.pop(number, 0.0))
            return loss

        def report(kind, fields):
            if kind == "round":
                self.rounds[number].append((now(), fields["round"], fields["participants"]))

        replica = self.arm.replica(number)
        driver = Driver(self.arm.make(), replica)
        self.cores[number] = Core.over(peer, driver, CountingTask(replica), inline, train, report)
        return peer

    def start(self, number, link=None, founds=False):
        peer, core = self.peer(number, link), self.cores[number]

        async def live():
            async with peer.running():
                if founds:
                    weights = torch.rand(VALUES, generator=torch.Generator().manual_seed(1))
                    core.driver.replica.write({"a": weights}, "param")
                    peer.found()
                    core.state_sync.open()
                else:
                    await peer.meet([record_of(identity(0), "run")], 60.0)
                    await core.state_sync.adopt(
                        None, lambda here, _: self.heard[number].append(here)
                    )
                    self.downloaded_s[number] = now()
                    peer.ask_in()
                noted = asyncio.create_task(self._note_membership(number))
                try:
                    await core.loop.run(10**12)
                finally:
                    await cancel(noted)
                    await drop(core.loop.under_way)

        self.tasks.append(asyncio.create_task(live()))

    async def _note_membership(self, number):
        while not self.peers[number].context.is_member:  # noqa: ASYNC110 - to know when
            await asyncio.sleep(0.05)
        self.member_s[number] = now()

    async def grown(self):
        for number in range(MEMBERS):
            self.start(number, founds=not number)
            await asyncio.sleep(1.0)
        await until(lambda: len(self.member_s) == MEMBERS, 60.0, "all are members")
        if self.arm.method == "diloco":
            await until(lambda: self.together(range(MEMBERS)), 60.0, "a round with all")

    def together(self, numbers):
        ids = {identity(number).peer for number in numbers}
        return all(self.rounds[each] and ids <= set(self.rounds[each][-1][2]) for each in numbers)

    def first_counted(self, number):
        """How many rounds after it was a member a newcomer was in one."""
        me, since_s = identity(number).peer, self.member_s[number]
        later = [who for at_s, _, who in self.rounds[1] if at_s >= since_s]
        return 1 + next(place for place, who in enumerate(later) if me in who)

    def pace(self, since_s, until_s):
        """The seconds of a round, of one that was there all the time."""
        times = [at_s for at_s, _, _ in self.rounds[1] if since_s <= at_s <= until_s]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def served_bytes(self):
        return sum(self.peers[each].context.chunks.server.sent_bytes for each in range(MEMBERS))

    async def end(self):
        for result in await cancel(*self.tasks):
            assert not isinstance(result, Exception), result


def in_village(step_s, **options):
    def decorate(main):
        def test():
            async def whole():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(spool, "CHUNK_BYTES", 16 * 1024)
                    village = Village(step_s, **options)
                    await village.grown()
                    await main(village)
                    await village.end()

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


@in_village(step_s=1.67)
async def test_three_newcomers_at_different_times_come_in_as_the_sum_says(village):
    """A round takes 0.3 of a newcomer's line, as one of 86 MB at 10 Mbit/s may."""
    round_s, came = PERIOD * village.arm.step_s, {}
    share = ROUND_BYTES / LINE / round_s
    assert 0.28 < share < 0.32
    await asyncio.sleep(3 * round_s)
    served_bytes, begun_s = village.served_bytes, now()
    for number in (3, 4, 5):
        came[number] = now()
        village.start(number, LinkModel(down_bytes_per_s=LINE))
        await asyncio.sleep(ALONE_S / 2)
    await until(lambda: village.member_s.keys() >= came.keys(), 60.0, "all three in")
    for number, came_s in came.items():
        said = village.heard[number]
        assert said == sorted(said), "progress went back"
        took_s = village.downloaded_s[number] - came_s
        # a second to ask, half of one to compare, and up to a round's time to cut after one
        assert took_s < 1.2 * ALONE_S / (1 - share) + 1.5 + min(COMMON_S, round_s), took_s
    await until(lambda: village.together(range(6)), 60.0, "rounds with all six")
    passed = (now() - begun_s) / round_s + 1
    most_bytes = 1.1 * 3 * STATE_BYTES + passed * 12 * ROUND_BYTES
    assert village.served_bytes - served_bytes < most_bytes
    for number in came:
        assert village.first_counted(number) <= 2


@in_village(step_s=0.25, codec="fp4", return_codec="fp4")
async def test_a_newcomer_that_misses_more_rounds_than_a_log_keeps_reads_no_second_state(village):
    logs = [village.peers[each].rounds.streams["delta"].log for each in range(MEMBERS)]
    heights, before = [], village.rounds[1][-1][1]

    async def look():
        while True:
            heights.append(max(map(len, logs)))
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    # its line is slow at first: rounds pass, and are kept
    link, me = LinkModel(down_bytes_per_s=LINE), identity(3).peer
    village.start(3, link)
    await until(lambda: village.rounds[1][-1][1] > before + LOG_ROUNDS + 4, 60.0, "many rounds")
    assert 3 not in village.downloaded_s
    village.network.set_link(me, LinkModel())
    await until(lambda: 3 in village.member_s, 60.0, "it is in")
    assert village.heard[3] == sorted(village.heard[3])
    assert max(heights) > LOG_ROUNDS
    await until(lambda: village.together(range(4)), 60.0, "rounds with all four")
    await asyncio.sleep(1.3 * READS_S)
    await cancel(looking)
    assert {len(log) for log in logs} == {LOG_ROUNDS}, "no more are kept once nobody reads"


@in_village(step_s=0.5, method="noloco")
async def test_a_state_that_is_one_member_s_alone_is_read_from_it_and_keeps_no_rounds(village):
    before = [village.peers[each].context.chunks.server.sent_bytes for each in range(MEMBERS)]
    village.start(3, LinkModel(down_bytes_per_s=LINE))
    await until(lambda: 3 in village.downloaded_s, 60.0, "it has the state")
    assert village.heard[3] == sorted(village.heard[3])
    readers = [village.peers[each].context.readers for each in range(MEMBERS)]
    assert [each.wanted("delta") for each in readers] == [None] * MEMBERS
    assert before
    await until(lambda: 3 in village.member_s, 60.0, "it is in")


@in_village(step_s=0.5, deadline_s=8.0)
async def test_a_member_whose_line_falls_behind_is_not_waited_for_and_says_why(village):
    before_s = now()
    await asyncio.sleep(20.0)
    alone_s = village.pace(before_s, now())
    with logged(absences.log) as said:
        village.network.set_link(identity(2).peer, LinkModel(down_bytes_per_s=LINE / 4))
        since_s = now()
        await asyncio.sleep(60.0)
        assert village.pace(since_s + 30.0, now()) < 1.3 * alone_s
        village.network.set_link(identity(2).peer, LinkModel())
        await until(lambda: village.together(range(MEMBERS)), 120.0, "it has caught up")
    assert any("behind, whose content has not come yet" in line for line in said)


@in_village(step_s=1.0, codec="fp4", return_codec="fp4", deadline_s=8.0)
async def test_a_member_that_misses_rounds_takes_one_state_though_more_pass_than_its_log_keeps(
    village,
):
    """One step of it takes long; it hears of all rounds meanwhile, and while the state comes."""
    peer, log_rounds = village.peers[2], 4
    village.network.set_link(peer.me, LinkModel(down_bytes_per_s=LINE / 2))
    village.held_s[2] = 60.0
    with pytest.MonkeyPatch.context() as patch, logged(state_sync.log) as said:
        patch.setattr(round_log, "LOG_ROUNDS", log_rounds)
        await until(lambda: peer.snapshots.coming, 100.0, "it takes the state")
        began = village.rounds[1][-1][1]
        await until(lambda: village.together(range(MEMBERS)), 300.0, "it has caught up")
        assert village.rounds[1][-1][1] > began + log_rounds, "no more passed than a log keeps"
        assert not any("do not come" in line for line in said)
        assert len(peer.rounds.streams["delta"].log) == log_rounds, "no more are kept after that"


@in_village(step_s=1.67)
async def test_five_newcomers_at_once_hardly_slow_the_others_down(village):
    for number in range(MEMBERS):
        up = LinkModel(up_bytes_per_s=1.5 * LINE)
        village.network.set_link(identity(number).peer, up)
    before_s = now()
    await asyncio.sleep(40.0)
    alone_s, since_s = village.pace(before_s, now()), now()
    newcomers = range(MEMBERS, MEMBERS + 5)
    for number in newcomers:
        village.start(number, LinkModel(down_bytes_per_s=2 * LINE))
    await until(lambda: village.downloaded_s.keys() >= set(newcomers), 100.0, "all five states")
    passed = [at_s for at_s, _, _ in village.rounds[1] if at_s > since_s]
    assert passed, "no round passed meanwhile"
    await asyncio.sleep(0.1)
    # at so slow a line, each piece of a state that has begun costs a round a fifth of a second
    assert village.pace(since_s - 1.1 * alone_s, now()) < alone_s / 0.9
