"""The watch of returns is told what no correct run does and must say so; it lets pass what is
correct."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
from worlds.chains.return_records import (
    BACK,
    MEMBERS,
    chain_of,
    decided,
    returned,
)

from farflock.node.assembly.coming_back import VIEW
from farflock.node.assembly.resume import Cursors
from farflock.node.simulate.return_invariants import HEARD_S, ReturnsChecker
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import Claim, RunPosition
from farflock.optimizers.method import All, Exchange, ExchangeKey, Result
from farflock.swarm.messages import HeldState
from farflock.swarm.protocol.views import Chain
from farflock.swarm.sim.virtual_time import run_virtual

TOKENS = 10  # of a step
PEERS = [member.peer for member in MEMBERS]


class Scene:
    """A watch, and lives whose views and rounds the test makes up."""

    def __init__(self):
        self.living = []
        self.watch = ReturnsChecker("diloco", PEERS, lambda: self.living)
        self.state = torch.zeros(2)
        snapshot = lambda replica: {"phi": self.state}  # noqa: E731
        self.driver = SimpleNamespace(
            method=SimpleNamespace(snapshot=snapshot, feedback=None),
            replica=None,
            streams=[SimpleNamespace(key=ExchangeKey("delta", 0), stride=1)],
            position=RunPosition({"delta": 6}),
        )

    def life(self, number, member, chain):
        """A life that knows these views, and has them on its disk."""
        context = SimpleNamespace(chain=chain)
        self.branching = SimpleNamespace(adrift=frozenset())
        peer = SimpleNamespace(me=PEERS[number], context=context, branching=self.branching)
        home = SimpleNamespace(
            number=number,
            birth=member.incarnation,
            began_s=asyncio.get_running_loop().time(),
            session=SimpleNamespace(peer=peer),
            part=SimpleNamespace(loop=SimpleNamespace(driver=self.driver)),
        )
        self.living.append(home)
        self.watch.kept(home, chain)
        return home

    def learns(self, home, chain):
        home.session.peer.context.chain = chain
        self.watch.kept(home, chain)

    def counts(self, home, number, value=1.0, tokens=2 * TOKENS, agreed=None, steps=2):
        """A life trains, offers its work to a round and alone is counted in it."""
        peer, key = home.session.peer, ExchangeKey("delta", number)
        mean = {"w": torch.full((2,), value)}
        agreed = tokens * (number + 1) if agreed is None else agreed
        result = Result("ok", number + 1, (peer.me,), (1.0,), mean, tokens=agreed)
        client = SimpleNamespace(encode=lambda exchange, claim: None)
        client.decode = lambda key, outcome, payloads=(): result
        self.watch.exchange_client(peer, home.number, home.birth, self.driver, client)
        for _ in range(steps):
            self.watch.reported(home.number, home.birth, self.driver, "step", {})
        client.encode(Exchange(key, "mean", All(), mean, codec="fp32"), Claim(tokens))
        client.decode(key, None, (b"payload",))


def violations(main):
    async def whole():
        scene = Scene()
        await main(scene)
        return scene.watch.violations

    return run_virtual(whole())


def require_one(found, words):
    assert len(found) == 1
    assert words in found[0]


def later(chain):
    """The chain with a further view, of all but the last."""
    other = Chain(chain.run, list(chain.views))
    assert other.extend(decided(other, MEMBERS[:3], 6, range(4)))
    return other


def test_a_return_of_all_in_new_lives_is_right():
    async def main(scene):
        chain = chain_of()
        before = [scene.life(number, member, chain) for number, member in enumerate(MEMBERS)]
        scene.counts(before[0], 5)
        scene.living.clear()
        lives = [scene.life(number, member, chain) for number, member in enumerate(BACK)]
        for home in lives:
            scene.learns(home, returned(chain))
        assert len(scene.watch.returns) == 1

    assert violations(main) == []


def test_a_key_that_acted_in_a_later_view_may_sign_no_return_of_the_one_before():
    async def main(scene, *, knows, is_damaged=False):
        chain = chain_of()
        home = scene.life(0, MEMBERS[0], later(chain))
        scene.counts(home, 6)
        if knows:
            scene.learns(home, chain)  # it gave up the later view, for another chain
        if is_damaged:
            scene.watch.damaged.add(PEERS[0])
        scene.living.clear()
        scene.learns(scene.life(0, BACK[0], chain), returned(chain))

    require_one(violations(lambda scene: main(scene, knows=False)), "acted in view 2, and signed")
    assert violations(lambda scene: main(scene, knows=True)) == []
    assert violations(lambda scene: main(scene, knows=False, is_damaged=True)) == []


def test_no_return_is_made_while_a_quorum_of_the_lives_before_it_lives():
    async def main(scene):
        chain = chain_of()
        lives = [scene.life(number, MEMBERS[number], chain) for number in (0, 1)]
        scene.learns(lives[0], returned(chain))

    require_one(violations(main), "was made while {0, 1} of it lived")


def test_no_return_lists_a_key_that_is_there_in_two_lives():
    async def main(scene, wait_s):
        chain = chain_of()
        lives = [scene.life(0, BACK[0], chain)]
        lives.append(scene.life(0, msgspec.structs.replace(BACK[0], incarnation=51), chain))
        await asyncio.sleep(wait_s)
        scene.learns(lives[0], returned(chain))

    require_one(violations(lambda scene: main(scene, HEARD_S)), "was there in two lives")
    assert violations(lambda scene: main(scene, HEARD_S - 1)) == []


def test_a_return_gives_up_no_round_that_a_signer_has_saved():
    async def main(scene, begins):
        chain = chain_of()
        home = scene.life(0, BACK[0], chain)
        cursors = Cursors(9, 0, RunPosition({"delta": 6}, 70), [])
        under = chain.newest.hash.hex()
        meta = {"node": msgspec.to_builtins(cursors), VIEW: under}
        scene.watch.enters(home, Checkpoint(Path(), 9, {}, meta, {}))
        scene.learns(home, returned(chain, begins=HeldState(begins, bytes(32), 60)))

    assert violations(lambda scene: main(scene, 7)) == []
    require_one(violations(lambda scene: main(scene, 6)), "has saved all rounds before 7")


def test_a_round_has_one_content_in_each_line_and_tokens_go_on_from_the_line_before():
    async def main(scene, value, tokens):
        chain = chain_of()
        home = scene.life(0, MEMBERS[0], chain)
        for number in (5, 6, 7):  # the last one is given up
            scene.counts(home, number)
        scene.living.clear()
        home = scene.life(0, BACK[0], chain)
        scene.learns(home, returned(chain))
        scene.counts(home, 7, value, agreed=tokens)

    assert violations(lambda scene: main(scene, 3.0, 160)) == []
    require_one(
        violations(lambda scene: main(scene, 3.0, 180)), "has 180 tokens after 140 and [20]"
    )


def test_work_of_a_round_that_a_return_gave_up_counts_again_and_no_other_work_does():
    async def main(scene, *more):
        chain = chain_of()
        home = scene.life(0, MEMBERS[0], chain)
        for number in (5, 6, 7):  # the last one is given up
            scene.counts(home, number)
        scene.living.clear()
        scene.learns(home, returned(chain, (MEMBERS[0], *BACK[1:])))
        for number in (7, *more):
            scene.counts(home, number, 3.0, agreed=20 * (number + 1), steps=0)

    assert violations(main) == []
    require_one(violations(lambda scene: main(scene, 8)), "80 tokens of ")


def test_what_is_of_a_chain_that_a_life_has_given_up_is_no_offer():
    async def main(scene, adrift):
        home = scene.life(0, MEMBERS[0], chain_of())
        for streams in (adrift, ()):
            scene.branching.adrift = streams
            scene.counts(home, 5)

    assert violations(lambda scene: main(scene, ("delta",))) == []
    require_one(violations(lambda scene: main(scene, ())), "twice: the key was used again")


def test_what_a_life_that_the_view_does_not_list_has_sent_does_not_count():
    async def main(scene):
        chain = chain_of()
        scene.counts(scene.life(0, BACK[0], chain), 5)

    require_one(violations(main), f"whose life {MEMBERS[0].incarnation} has sent nothing to it")
