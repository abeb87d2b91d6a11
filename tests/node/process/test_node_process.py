"""A node says what it computes on, and names doors of members alone in its invites."""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

from farflock.node.model.device import Device
from farflock.node.process import node_process as module
from farflock.node.process.inviting import Inviter
from farflock.node.process.network import AddressCache
from farflock.node.process.node_process import NodeProcess
from farflock.node.run.invite import parse
from farflock.node.state.paths import RunFolder
from farflock.swarm.capability import Issuers
from farflock.swarm.context import Entrance
from farflock.swarm.identity import Identity
from farflock.swarm.protocol.roll import first_roll
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.record import Record
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel

RUN = "ab" * 16
ME, MEMBER, SILENT, STRANGER = (Identity.from_seed(bytes([seed]) * 32).peer for seed in range(4))
USED = f"/ip4/192.0.2.9/tcp/4001/p2p/{SILENT}"


def door(peer):
    return f"/ip4/192.0.2.7/tcp/4001/p2p/{peer}"


def node_of(folder, *members):
    """A node of a view with these members that knows the records of two others."""
    records = {
        peer: Record(RUN, peer, 1, 1, bytes(32), doors=doors)
        for peer, doors in ((STRANGER, (door(STRANGER),)), (MEMBER, (door(MEMBER),)), (SILENT, ()))
    }
    view = View(3, bytes(32), 0, tuple(Member(peer, 1) for peer in members))
    peer = SimpleNamespace(
        me=ME,
        context=SimpleNamespace(
            chain=SimpleNamespace(newest=view) if members else None, entrance=Entrance(Issuers(ME))
        ),
        membership=SimpleNamespace(
            records=records,
            admission=SimpleNamespace(rolls=SimpleNamespace(roll=first_roll(ME))),
        ),
    )
    machine = SimpleNamespace(folder=RunFolder(folder))
    directory = SimpleNamespace(addresses=(door(ME), door(MEMBER)))
    part = SimpleNamespace(peer=peer)
    inviter = Inviter(Identity.from_seed(bytes(32)), peer, RUN, ME)
    known = machine, None, RUN, ME, inviter, part, directory
    return NodeProcess(*known, *(None,) * 5, doors=(USED,))


@pytest.mark.parametrize(
    ("members", "doors"),
    [
        ((), (door(ME), USED)),
        ((ME, MEMBER, SILENT), (door(ME), door(MEMBER), USED)),
        ((ME, STRANGER), (door(ME), door(STRANGER), USED)),
    ],
)
def test_an_invite_names_the_doors_of_members_and_those_that_were_used(tmp_path, members, doors):
    invite = parse(node_of(tmp_path, *members).invite(), time.time())
    assert invite.addresses == doors


def test_the_addresses_kept_for_the_next_start_are_of_members_and_those_that_were_used(
    tmp_path,
):
    async def main():
        node = node_of(tmp_path, ME, MEMBER)
        remembering = asyncio.create_task(node.remember())
        await asyncio.sleep(2 * module.REMEMBER_EVERY_S)
        await cancel(remembering)

    run_virtual(main())
    assert AddressCache(RunFolder(tmp_path)).read(RUN).addresses == (door(MEMBER), USED)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((0, 1), r"this node trains on Double Card, .* free, fp32"),
        ((1,), r"this node serves stage 1 on Double Card, .* free, fp32"),
        ((), "this node trains without weights: servers of stages compute, and not Double Card"),
    ],
)
def test_each_role_of_a_pipeline_says_what_it_computes_on(card, stages, expected):
    servings = tuple(SimpleNamespace(index=index) for index in stages)
    part = SimpleNamespace(servings=servings, serving=next(iter(servings), None))
    machine = SimpleNamespace(device=Device(card, "Double Card", "fp32"))
    node = NodeProcess(machine, *(None,) * 4, part, *(None,) * 6)
    assert re.fullmatch(expected, node.says_device())
