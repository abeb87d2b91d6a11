"""A node's standing invite stays one word as long as it lets peers in, and names what it allows."""

import time
from types import SimpleNamespace

import pytest

from farflock.node.process import inviting as module
from farflock.node.process.inviting import INVITE_LASTS_S, STANDING_USES, Inviter
from farflock.node.run.invite import mint, parse
from farflock.swarm.capability import Issuers, unseal
from farflock.swarm.context import Entrance
from farflock.swarm.identity import Identity
from farflock.swarm.protocol.enrolment import admittance_of
from farflock.swarm.protocol.roll import first_roll

RUN = "ab" * 16
FOUNDER, MEMBER = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2))
BEGUN = first_roll(FOUNDER.peer)
DOORS = (f"/ip4/192.0.2.7/tcp/4001/p2p/{FOUNDER.peer}",)


def inviter_of(identity, *, roll=BEGUN, members=True, authorities=()):
    rolls = SimpleNamespace(roll=roll)
    peer = SimpleNamespace(
        me=identity.peer,
        context=SimpleNamespace(entrance=Entrance(Issuers(FOUNDER.peer, authorities, members))),
        membership=SimpleNamespace(admission=SimpleNamespace(rolls=rolls)),
    )
    return Inviter(identity, peer, RUN, FOUNDER.peer), rolls


def test_the_word_stays_the_same_while_addresses_do():
    inviter, _ = inviter_of(FOUNDER)
    word = mint(inviter.invite(DOORS))
    assert mint(inviter.invite(DOORS)) == word
    read = parse(word, time.time())
    assert (read.addresses, read.grant.issuer) == (DOORS, FOUNDER.peer)
    assert read.grant.uses == read.grant.votes == STANDING_USES
    inviter, _ = inviter_of(MEMBER, roll=first_roll(MEMBER.peer))
    assert inviter.invite(DOORS).grant.votes == 0, "a member's invite brings no votes"
    assert INVITE_LASTS_S <= read.expires - time.time() <= INVITE_LASTS_S + 3600


def test_a_capability_that_is_used_up_or_half_over_gets_a_successor(monkeypatch):
    inviter, rolls = inviter_of(FOUNDER)
    first = inviter.invite(DOORS)
    by = admittance_of(unseal(first.ticket.capability, RUN), Issuers(FOUNDER.peer))
    full = [(f"k{number}", by) for number in range(STANDING_USES)]
    rolls.roll = rolls.roll.with_keys(full[:-1])
    assert inviter.invite(DOORS) == first
    rolls.roll = rolls.roll.with_keys(full)
    second = inviter.invite(DOORS)
    assert second.grant.secret != first.grant.secret
    later_s = time.time() + INVITE_LASTS_S / 2 + 3601
    monkeypatch.setattr(module.time, "time", lambda: later_s)
    assert inviter.invite(DOORS).grant.secret != second.grant.secret


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, False),  # not a member yet
        ({"roll": None}, False),
        ({"roll": first_roll(MEMBER.peer)}, True),
        ({"roll": first_roll(MEMBER.peer), "members": False}, False),
        ({"roll": None, "members": False, "authorities": (MEMBER.peer,)}, True),
    ],
)
def test_only_those_that_members_believe_invite(options, allowed):
    inviter, _ = inviter_of(MEMBER, **options)
    assert (inviter.invite(DOORS) is not None) == allowed
