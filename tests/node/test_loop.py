"""The loop around real nodes: peers that are late, missed rounds, or were left behind."""

import asyncio
from types import SimpleNamespace

import pytest

from farflock.node.loop import Loop
from farflock.node.train.driver import Claim, Wait
from farflock.node.train.ending import drain
from farflock.node.train.exchange_client import STOPPING_WAIT_S, OutOfStep
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual


async def gather(bench, tokens, slowness):
    """Peers of these speeds train to `tokens`: what they reported, and the nodes at the end."""
    reports = [[] for _ in slowness]
    nodes = []

    async def live(number):
        async with bench.peer(number).running() as peer:
            node = bench.node(peer, lambda kind, fields: reports[number].append((kind, fields)))
            nodes.append(node)
            quick = node.loop.train

            async def train(work):
                loss = await quick(work)
                await asyncio.sleep(slowness[number])
                return loss

            node.loop.train = train
            if number == 0:
                node.found()
            else:
                await node.join([bench.record(other) for other in range(number)], 60.0)
            await node.loop.run(tokens, drain_s=30.0)
            done.append(number)
            while len(done) < len(slowness):  # by its own estimate it ends before the others
                await asyncio.sleep(0.5)
                await node.loop.begin_step()

    done = []
    async with asyncio.TaskGroup() as group:
        for number in range(len(slowness)):
            group.create_task(live(number))
            await asyncio.sleep(1.0)
    return reports, nodes


def hashes_by_round(nodes):
    found = {}
    for node in nodes:
        driver = node.loop.driver
        state = driver.method.snapshot(driver.replica)
        found.setdefault(int(state["round"]), set()).add(state_hash(state))
    return found


@pytest.mark.parametrize("method", ["diloco", pytest.param("ddp", marks=pytest.mark.long)])
def test_a_peer_that_is_late_for_every_round_stays_bit_equal_under_a_schedule(bench, text, method):
    """It applies rounds from the log at the rates of those rounds and not of its own step."""
    made = bench(
        text,
        method,
        peers=3,
        total=6400,
        deadline_s=2.0,
        **({"period": 3} if method == "diloco" else {}),
    )
    reports, nodes = run_virtual(gather(made, 6400, [0.0, 0.1, 3.0]))
    for peer in reports:
        assert not [fields for kind, fields in peer if kind == "adopt"]
    missed = {
        fields["round"]
        for kind, fields in reports[2]
        if kind == "round" and fields["status"] == "partial"
    }
    assert missed, "no peer was late, so this test shows nothing"
    for number, states in hashes_by_round(nodes).items():
        assert len(states) == 1, f"states differ after round {number}"


class Silent:
    """A driver, client, state sync and training task in one; it has one exchange in flight.

    No peer answers that exchange for `answer_s` seconds.
    """

    tokens_per_step = 1
    weight = 1.0

    def __init__(self, answer_s):
        self.computing = False
        self.answer_s, self.asked, self.missed, self.members = (
            answer_s,
            None,
            lambda: None,
            lambda: 1,
        )

    def run_s(self):
        return asyncio.get_running_loop().time()

    def progress(self, step, run_s):
        return Progress(step, step, run_s)

    def trained(self, tokens, members):
        pass

    def after_step(self, progress):
        if progress.step > 1:
            return []
        self.asked = progress.run_time_s
        return [Exchange(ExchangeKey("delta", 0), "mean", All(), tensors={})]

    def resolve(self, key, result):
        self.asked = None

    def next(self, progress, *, last):
        return None if self.asked is None else Wait(ExchangeKey("delta", 0), self.asked + 1000)

    def claim(self, exchange):
        assert not self.computing, "a stage's leases belong to the event loop's thread"
        return Claim(0)

    def hashed(self, exchange, claim):
        assert self.computing, "to hash a state takes long"
        return claim

    async def compute(self, work):
        self.computing = True
        try:
            return work()
        finally:
            self.computing = False

    def encoded(self, exchange, claim, encode):
        return encode(exchange, self.hashed(exchange, claim))

    def offer(self, exchange, claim):
        return SimpleNamespace(exchange=exchange, payloads=())

    async def exchange(self, offer):
        await asyncio.sleep(self.answer_s)

    def decode(self, key, outcome, payloads):
        return None


@pytest.mark.parametrize(
    ("answer_s", "ends_s"), [(500.0, 6.5 + STOPPING_WAIT_S), (8.0, 8.0), (3.0, 7.0)]
)
def test_a_loop_that_is_stopped_waits_only_for_an_answer_that_is_about_to_come(answer_s, ends_s):
    async def main():
        silent = Silent(answer_s)

        async def train(work):
            if loop.step:
                await asyncio.sleep(4.0)
            return 1.0

        loop = Loop(silent, silent, silent, silent, compute=silent.compute, train=train)
        asyncio.get_running_loop().call_later(6.5, loop.stop)
        began_s = asyncio.get_running_loop().time()
        await loop.run(10**6)
        assert not loop.under_way
        return asyncio.get_running_loop().time() - began_s, silent.asked

    took_s, asked = run_virtual(main())
    assert took_s == pytest.approx(ends_s, abs=0.01)
    assert (asked is None) == (answer_s < 500)


@pytest.mark.parametrize(("comes_s", "takes_s"), [(1.0, (1.0, 1.2)), (100.0, (3.0, 3.2))])
def test_at_its_end_it_waits_within_a_limit_for_the_content_of_a_round_decided_without_it(
    bench, text, monkeypatch, comes_s, takes_s
):
    async def main():
        made = bench(text, "ddp", peers=1)
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.found()
            loop = asyncio.get_running_loop()
            begun_s, replayed = loop.time(), []

            def missed(self):
                if loop.time() - begun_s >= comes_s and not replayed:
                    replayed.append(loop.time())

            monkeypatch.setattr(type(node.loop.state_sync), "missed", missed)
            monkeypatch.setattr(
                type(node.loop.state_sync), "is_behind", property(lambda state_sync: not replayed)
            )
            await drain(node.loop, 3.0)
            return loop.time() - begun_s

    low, high = takes_s
    assert low <= run_virtual(main()) <= high


@pytest.mark.parametrize("last", [False, True])
def test_a_missed_round_that_is_gone_starts_the_peer_over_but_not_after_its_last_step(last):
    async def main():
        silent, reasons = Silent(500.0), []

        def missed():
            raise OutOfStep("round 4 is gone")

        async def adopt(reason):
            reasons.append(reason)

        silent.missed, silent.is_behind = missed, True
        loop = Loop(silent, silent, silent, silent, compute=silent.compute, train=silent.compute)
        loop.adopt = adopt
        await (drain(loop, 3.0, last=True) if last else loop.begin_step())
        return reasons

    assert run_virtual(main()) == ([] if last else ["round 4 is gone"])
