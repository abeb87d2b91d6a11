"""A run of very many views, as a newcomer is shown it.

Voters stay for a time that is exponentially distributed, and each is replaced at once by a new one,
at the end of the line of seniority. Every `EVERY_S` a visitor comes or goes, so that each view has
other members than the one before. A view is signed by a quorum of its parent, drawn anew each time,
or by all of the parent's voters. Keys are real, and so are the signatures of what is sent; the
views that are left behind are not signed.
"""

import functools
import itertools
import random

from farflock.swarm.identity import Identity
from farflock.swarm.messages import Views
from farflock.swarm.protocol import backbone, views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.views import Certified, Member

RUN, EVERY_S, STAY_S = "run", 10.0, 8 * 3600.0


@functools.cache
def identity(number):
    return Identity.from_seed(number.to_bytes(32, "big"))


@functools.cache
def numbers():
    return {}


def member(number):
    numbers()[identity(number).peer] = number
    return Member(identity(number).peer, number)


FOUNDER = identity(0).peer


def signature(certified, peer):
    view = certified.view
    text = signed_text(
        views.view_key(view.number), view.previous, certified.ballot, views.encode(view)
    )
    return identity(numbers()[peer]).sign(vote_domain(RUN), text)


def unsigned(parent, view, chance, everybody):
    """A certificate with empty signatures."""
    order = list(range(len(parent.electorate)))
    chance.shuffle(order)
    signers = []
    for index in order:
        signers.append(index)
        if not everybody and parent.electorate.is_quorum(signers):
            break
    return Certified(view, (0, 0), tuple((index, b"") for index in sorted(signers)))


def voters_over_time(count, chance, leave_every_view):
    """Yield the voters of each view: some leave now and then, and a visitor comes and goes."""
    serial = itertools.count(1)
    staying = [member(0)]
    visitor = None
    while True:
        while len(staying) < count - 1:
            staying.append(member(next(serial)))
        if leave_every_view:
            gone = chance.randrange(len(staying))
            staying[gone : gone + 1] = []
            staying.append(member(next(serial)))
        else:
            stay = [one for one in staying if chance.random() >= EVERY_S / STAY_S]
            lost = len(staying) - len(stay)
            staying = stay + [member(next(serial)) for _ in range(lost)]
        visitor = None if visitor else member(next(serial))
        yield (*staying, visitor) if visitor and not leave_every_view else tuple(staying)


def grown(count, length, seed=1, everybody=False, leave_every_view=False):
    """The chain of `length` views after view 0, of which the newest are signed."""
    chance = random.Random(seed)
    chain = backbone.begun(RUN, FOUNDER, views.founded(RUN, identity(0), member(0)))
    for members in itertools.islice(voters_over_time(count, chance, leave_every_view), length):
        parent = chain.newest
        certified = unsigned(parent, views.successor(parent, members), chance, everybody)
        chain.views.append(certified)
        for left in chain.views[: -views.KEPT_VIEWS]:
            chain.past.take(left)
        del chain.views[: -views.KEPT_VIEWS]
    return chain


def shown(chain):
    """The messages that lead a newcomer to the chain's newest view, signed."""
    by_hash = {chain.past.first.view.hash: chain.past.first.view}
    links = []
    for link in backbone.proof(chain):
        base = by_hash[link.base]
        by_hash[link.view.hash] = link.view
        links.append(signed(link, base))
    after = links[-1].view.number if links else -1
    entries = [each for each in chain.views if each.view.number > after]
    parents = [by_hash[links[-1].view.hash], *(each.view for each in entries)]
    rest = [signed(each, parent) for each, parent in zip(entries, parents, strict=False)]
    return messages(chain, packed(chain, links), rest)


def signed(record, base):
    proofs = tuple(
        (index, signature(record, base.electorate.peers[index])) for index, _ in record.proofs
    )
    return type(record)(**{**fields(record), "proofs": proofs})


def fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}


def packed(chain, links):
    """The links of a chain's proof in bytes."""
    bases = [chain.past.first.view, *(link.view for link in links)]
    return [backbone.pack(link, base) for link, base in zip(links, bases, strict=False)]


def messages(chain, links, rest):
    number, said = chain.newest.number, []
    first = (views.encode(chain.past.first),)
    while links:
        part = views.fitting(links)
        said.append(Views(first if not said else (), part, number))
        links = links[len(part) :]
    while rest:
        part = views.fitting(map(views.encode, rest))
        said.append(Views(part, (), number))
        rest = rest[len(part) :]
    return said
