"""The law of `Session` (node/assembly/session.py) in four worlds: in memory, with a directory, over
the links of benchmarks, and as in a process."""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds.peers import identity, record_of
from worlds.waiting import until

from farflock.node.assembly.known_run import learn_run, own_run
from farflock.node.assembly.own_world import identity_of
from farflock.node.assembly.peer_world import Clock, Files, PeerWorld
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.assembly.session import INVITE_LASTS_S, AddressCache, Session, parse_own
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.library.presence import ExternalStep, JoinRequest, OptimizerNode
from farflock.node.model.replica import PlainReplica
from farflock.node.process.network import MachineOptions, network
from farflock.node.run.invite import Invite, founder_of, mint, parse
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import fingerprint, founded, wish
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.paths import RunFolder
from farflock.swarm.compute import inline
from farflock.swarm.contact import Contact
from farflock.swarm.protocol import views
from farflock.swarm.sim.directory import MemoryTable
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

JOIN_S = 60.0
STEP_S = 0.02
CONTACT = Contact(
    "12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2", bytes(32), "192.0.2.7", 4001, 4002
)


class InMemory:
    """Links in memory, and records that are handed over."""

    run = staticmethod(run_virtual)
    table = None

    def __init__(self, folder):
        self.folder = folder
        self.network = SimNetwork(1, LinkModel(1e9, 1e9, 0.001))

    def identity(self, number):
        return identity(number)

    @contextlib.asynccontextmanager
    async def open(self, number, run, life=1):
        me = self.identity(number)
        links = self.network.links(me.peer)
        record = record_of(me, run, life)
        links.record = lambda: record
        directory = None if self.table is None else self.table.directory(me.peer)
        yield PeerWorld(links, directory, files=self.files(number))

    def invite(self, founder):
        """Take an invite, if that is the way in."""

    def files(self, number):
        folder = self.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        return Files(RunFolder(folder))

    async def known(self, world, founder):
        return replace(founder.known, records=[founder.peer.membership.book.mine])


class WithDirectory(InMemory):
    """The same, with a directory that introduces members."""

    @contextlib.asynccontextmanager
    async def open(self, number, run, life=1):
        if self.table is None:
            self.table = MemoryTable(run, 1, asyncio.get_running_loop().time)
        async with super().open(number, run, life) as world:
            yield world

    async def known(self, world, founder):
        run, peer = founder.known.run, founder.known.founder
        return await learn_run(world, Invite(run, founder_of(peer), (), "", 0), JOIN_S, UserModel)


class OverSockets(InMemory):
    """The links of benchmarks: real ones, without a directory."""

    run = staticmethod(asyncio.run)

    @contextlib.asynccontextmanager
    async def open(self, number, run, life=1):
        links = await ZmqLinks.open(self.identity(number), run, LinkOptions(incarnation=life))
        try:
            yield PeerWorld(links, None, Clock(time.time, rests=True), files=self.files(number))
        finally:
            await links.close()


class AsProcess(OverSockets):
    """What a process has, and an invite as the way in."""

    def identity(self, number):
        return identity_of(RunFolder(self.folder / str(number)))

    def __init__(self, folder):
        super().__init__(folder)
        self.invited = ()

    @contextlib.asynccontextmanager
    async def open(self, number, run, life=1):
        machine = MachineOptions(RunFolder(self.folder / str(number)))
        async with network(machine, self.identity(number), run, self.invited) as (world, _):
            yield world

    def invite(self, founder):
        self.invited = parse(founder.invite(), time.time()).members

    async def known(self, world, founder):
        invite = parse(founder.invite(), time.time())
        return await learn_run(world, invite, JOIN_S, UserModel)


class Program:
    """A user's own loop: its part over a session's peer, and its steps."""

    def __init__(self, session, seed):
        torch.manual_seed(seed)
        self.model, terms = nn.Linear(4, 1), session.known.manifest
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        replica = PlainReplica(self.model, inner, None)
        request = JoinRequest({}, replica, ExternalStep(), lambda kind, fields: None)
        self.part = OptimizerNode.assemble(
            request, terms, session.peer, inline, session.invite, founder=seed == 0
        )
        self.part.training_task.closure = lambda: self._closure(inner)

    def _closure(self, inner):
        inner.zero_grad()
        loss = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    @property
    def weights(self):
        driver = self.part.loop.driver
        values = driver.method.eval_params(driver.replica).values()
        return torch.cat([x.flatten() for x in values])

    async def steps(self):
        loop = self.part.loop
        while True:
            await loop.end_step(loop.train_one(await loop.begin_step()))
            await asyncio.sleep(STEP_S)


def manifest():
    model = nn.Linear(4, 1)
    print_ = fingerprint(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    return founded(wish(print_, "diloco", {"name": None, "seed": 3}, {"period": 4, "view_s": 1.0}))


@contextlib.asynccontextmanager
async def founder(kind):
    """A founder that trains: its session and its program."""
    known = own_run(kind.identity(0), manifest())
    async with (
        kind.open(0, known.run) as world,
        Session(world, kind.identity(0), known).running() as session,
    ):
        program = Program(session, 0)
        session.start(program.part)
        training = asyncio.create_task(program.steps())
        try:
            await until(lambda: program.part.step >= 10)
            yield session, program
        finally:
            await cancel(training)


@contextlib.asynccontextmanager
async def newcomer(kind, other, number=1, life=1):
    """The session and the program of a peer that knows the run, and has no part in it yet."""
    kind.invite(other)
    async with kind.open(number, other.known.run, life) as world:
        known = await kind.known(world, other)
        async with Session(world, kind.identity(number), known).running() as session:
            yield session, Program(session, number)


@pytest.fixture(
    params=[
        InMemory,
        WithDirectory,
        pytest.param(OverSockets, marks=pytest.mark.net),
        pytest.param(AsProcess, marks=pytest.mark.net),
    ]
)
def kind(request, tmp_path):
    return request.param(tmp_path)


def test_a_newcomer_is_a_member_only_once_it_has_the_state_and_says_goodbye(kind):
    async def main():
        async with founder(kind) as (first, _):
            async with newcomer(kind, first) as (second, program):
                assert not second.peer.membership.is_member
                fresh, ask_in, asked = program.weights, second.peer.ask_in, []

                def asking():
                    asked.append(not torch.equal(program.weights, fresh))
                    ask_in()

                second.peer.ask_in = asking
                await second.join(program.part, JOIN_S)
                assert asked == [True]
                await until(lambda: first.peer.context.views.newest.lists(second.peer.me))
                # the terms that run are those of the invite's hash
                assert second.known.manifest == first.known.manifest
                assert second.known.manifest.run_id(first.known.founder) == first.known.run
                me = second.peer.me
            assert first.peer.context.left(me)
            return first.peer.me, me

    kind.run(main())


def test_a_session_that_an_error_ends_says_nothing(kind):
    async def main():
        async with founder(kind) as (first, _):
            with pytest.raises(RuntimeError, match="killed"):
                async with newcomer(kind, first) as (second, program):
                    await second.join(program.part, JOIN_S)
                    me = second.peer.me
                    await until(lambda: first.peer.context.views.newest.lists(me))
                    raise RuntimeError("killed")
            assert not first.peer.context.left(me)
            assert not first.peer.context.leaving

    kind.run(main())


def test_a_visitor_learns_the_members_and_is_none(kind):
    async def main():
        async with founder(kind) as (first, _):
            async with newcomer(kind, first) as (visitor, _):
                await visitor.watch(JOIN_S)
                assert visitor.peer.context.views.newest.peers == (first.peer.me,)
            await asyncio.sleep(0.5)
            assert first.peer.context.views.newest.peers == (first.peer.me,)

    kind.run(main())


@pytest.mark.parametrize("kind", [InMemory], indirect=True)
def test_a_full_run_is_said_once_and_waited_for_or_refused_before_the_download(
    kind, monkeypatch, caplog
):
    monkeypatch.setattr(views, "MAX_MEMBERS", 1)

    async def main():
        async with founder(kind) as (first, _), newcomer(kind, first) as (second, program):
            second.waits_for_room = False
            with pytest.raises(RefusedByRun, match=r"the run is full: .* without --no-wait, to"):
                await second.join(program.part, JOIN_S)
            second.waits_for_room = True
            joining = asyncio.create_task(second.join(program.part, JOIN_S))
            await asyncio.sleep(100.0)
            assert caplog.messages.count(caplog.messages[-1]) == 1
            assert caplog.messages[-1].endswith("; this node waits until one of them leaves")
            assert second.peer.snapshots.coming is None
            monkeypatch.undo()
            await joining
            assert second.peer.membership.is_member

    run_virtual(main())


@pytest.mark.parametrize("kind", [InMemory, WithDirectory], indirect=True)
def test_the_same_seed_gives_the_same_bytes(kind, tmp_path):
    def bytes_of(made):
        digest = hashlib.sha256()

        def heard(now_s, sender, receiver, frame):
            digest.update(f"{now_s}/{sender}/{receiver}/".encode() + frame)
            return frame

        made.network.tap = heard

        async def main():
            async with founder(made) as (first, _), newcomer(made, first) as (second, program):
                await second.join(program.part, JOIN_S)
                training = asyncio.create_task(program.steps())
                await until(lambda: program.part.step >= 20)
                await cancel(training)

        run_virtual(main())
        return digest.digest()

    assert bytes_of(type(kind)(tmp_path / "one")) == bytes_of(type(kind)(tmp_path / "other"))


@pytest.mark.parametrize("kind", [InMemory], indirect=True)
def test_a_founder_that_nobody_outlived_resumes_in_another_life(kind):
    async def first_life():
        async with founder(kind) as (_, program):
            groups, cursors = checkpoint_state(program.part)
            step = program.part.step
            return Checkpoint(Path(), step, groups, {"node": cursors}, {}), step

    async def second_life(saved, step):
        known = own_run(identity(0), manifest())
        async with (
            kind.open(0, known.run, life=2) as world,
            Session(world, identity(0), known).running() as session,
        ):
            program = Program(session, 0)
            await session.resume(program.part, saved)
            assert program.part.step == step
            assert session.peer.membership.is_member

    run_virtual(second_life(*run_virtual(first_life())))


@pytest.mark.parametrize("kind", [InMemory], indirect=True)
def test_an_invite_names_addresses_and_lasts_a_week_and_none_is_made_without_any(kind):
    async def main():
        async with founder(kind) as (session, _):
            with pytest.raises(Failure, match="no invite can be made: this peer knows no member"):
                session.invite()
            session.known = replace(session.known, contacts=(CONTACT, CONTACT))
            invite, now_s = parse(session.invite(), 0.0), asyncio.get_running_loop().time()
            assert invite.run == session.known.run
            assert invite.members == (CONTACT,)
            assert invite.name == "unnamed"
            assert 0 <= invite.expires - now_s - INVITE_LASTS_S < 3600
            await asyncio.sleep(2.0)
            assert AddressCache(session.world.files.folder).read(invite.run).members == (CONTACT,)

    run_virtual(main())


def test_an_invite_that_has_expired_is_good_for_whoever_was_in_its_run(tmp_path):
    invite = Invite("a" * 32, founder_of(CONTACT.peer), (CONTACT,), "run", 1000)
    mine, another = RunFolder(tmp_path / "mine"), RunFolder(tmp_path / "another")
    for folder, known in ((mine, invite), (another, replace(invite, run="b" * 32))):
        folder.path.mkdir()
        AddressCache(folder).write(known)
    assert parse_own(mint(invite), mine, 2000.0) == invite
    for folder in (another, RunFolder(tmp_path / "new"), None):
        with pytest.raises(Usage, match="expired"):
            parse_own(mint(invite), folder, 2000.0)


@pytest.mark.parametrize("kind", [WithDirectory], indirect=True)
def test_a_member_publishes_the_head_so_that_the_run_outlives_its_founder(kind):
    async def main():
        async with founder(kind) as (first, _), newcomer(kind, first) as (second, program):
            await second.join(program.part, JOIN_S)
            await asyncio.sleep(1.0)
            assert await second.world.directory.heads(first.known.run) == [first.known.head]
            kind.network.kill(first.peer.me)
            async with newcomer(kind, first, number=2) as (third, _):
                assert third.known.manifest == first.known.manifest

    run_virtual(main())
