"""Chains of views with returns, as records."""

import msgspec

from farflock.swarm.identity import Identity
from farflock.swarm.messages import HeldState
from farflock.swarm.protocol import views
from farflock.swarm.protocol.decide import signed_text
from farflock.swarm.protocol.returns import return_of
from farflock.swarm.protocol.views import Certified, Chain, Member, encode, genesis, view_key

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
MEMBERS = tuple(Member(identity.peer, 10 + number) for number, identity in enumerate(IDENTITIES))
BACK = tuple(msgspec.structs.replace(member, incarnation=50) for member in MEMBERS)  # new lives
STATE = bytes(range(32))
HELD = HeldState(7, STATE, 70)


def decided(chain, members, first_round, signers):
    newest = chain.newest
    view = views.View(newest.number + 1, newest.hash, first_round, tuple(members))
    text = signed_text(view_key(view.number), (0, 0), encode(view))
    keys = {identity.peer: identity for identity in IDENTITIES}
    domain = views.signature_domain(RUN)
    proofs = ((index, keys[newest.peers[index]].sign(domain, text)) for index in signers)
    return Certified(view, (0, 0), tuple(proofs))


def chain_of(members=MEMBERS, first_round=5):
    """A chain of genesis and one view of these members."""
    chain = Chain(RUN, [Certified(genesis(RUN, MEMBERS[0]))])
    assert chain.extend(decided(chain, members, first_round, [0]))
    return chain


def signed(parent, view, leavers=(), domain=None):
    """A return that all keys of its parent have signed, but for the leavers, who said goodbye."""
    text, proofs = encode(view), []
    for index, identity in enumerate(IDENTITIES[: len(parent.members)]):
        if index in leavers:
            said = views.goodbye_text(parent, identity.peer)
            proofs.append((index, identity.sign(views.goodbye_domain(RUN), said)))
        else:
            proofs.append((index, identity.sign(domain or views.return_domain(RUN), text)))
    return Certified(view, proofs=tuple(proofs))


def returned(chain, here=BACK, gone=(), begins=HELD):
    leavers = [chain.newest.peers.index(peer) for peer in gone]
    other = Chain(RUN, list(chain.views))
    assert other.extend(
        signed(chain.newest, return_of(chain.newest, here, gone, {0: begins}), leavers)
    )
    return other
