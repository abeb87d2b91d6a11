"""A voter that signs two statements which contradict each other is out, whoever holds both of them
shows it to all, and nobody is convicted on another's word."""

import collections

import msgspec
import pytest
from worlds.herd import Divided, grown, in_virtual_time
from worlds.waiting import until

from farflock.swarm.messages import Join, Key, Prepare, Proven
from farflock.swarm.peer.views.conviction_sync import CONTRADICTS, FALSE_PROOF, PROOFS
from farflock.swarm.peer.views.refounding import LOST_S
from farflock.swarm.protocol.agreement.convictions import Contradiction, SignedVote
from farflock.swarm.protocol.agreement.justified import vote_domain, vote_text
from farflock.swarm.protocol.views import view_key
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.stable.storage import MemoryStorage

MEMBERS, LIAR = 4, 3
ONE, OTHER = b"1" * 32, b"2" * 32


def honest_of(herd):
    return [node for number, node in herd.nodes.items() if number != LIAR]


def proof_against(node, signer=None):
    """Two votes of a node in one ballot, about a round of its newest view, signed by `signer`."""
    key, ballot, view = Key("weights", 1000), (0, 0), node.view.hash
    sign = (signer or node.identity).sign
    votes = [
        SignedVote(ballot, digest, sign(vote_domain("run"), vote_text(key, view, ballot, digest)))
        for digest in (ONE, OTHER)
    ]
    return msgspec.msgpack.encode(Contradiction(node.id, key, view, *votes))


def suspects(node):
    return {(each.peer, each.what) for each in node.peer.context.accusations}


def are_without(nodes, peer):
    return all(peer not in node.members for node in nodes)


async def convicted(herd):
    """One member gets a proof against the liar; all go on without it."""
    liar, honest = herd.nodes[LIAR], honest_of(herd)
    honest[0].peer.membership.admission.convictions.receive(
        honest[1].id, Proven((proof_against(liar),))
    )
    await until(lambda: are_without(honest, liar.id), 30, "views without the liar")


async def rounds_go_on(nodes, rounds=5):
    start = max(node.applied for node in nodes)
    await until(lambda: min(node.applied for node in nodes) >= start + rounds, 60, "rounds")


@in_virtual_time(MEMBERS)
async def test_one_that_holds_a_proof_shows_it_to_all_and_the_convicted_never_comes_back(herd):
    liar, honest = herd.nodes[LIAR], honest_of(herd)
    await convicted(herd)
    herd.kill(LIAR)
    herd.start(LIAR)
    judge = honest[0]
    request = Join(seal(liar.identity, Record("run", liar.id, 900, 900, bytes(32))))
    judge.peer.membership.receive(liar.id, 900, request)
    assert liar.id not in judge.peer.membership.admission.candidates.joining
    await rounds_go_on(honest)
    await rounds_go_on(honest, 10)
    assert are_without(honest, liar.id)
    assert all(suspects(node) == {(liar.id, CONTRADICTS)} for node in honest)


@in_virtual_time(MEMBERS)
async def test_a_newcomer_is_told_of_earlier_convictions(herd):
    liar = herd.nodes[LIAR]
    await convicted(herd)
    herd.start(MEMBERS)
    newcomer = herd.nodes[MEMBERS]
    await until(lambda: newcomer.peer.context.entrance.convicted == {liar.id}, 30, "the proof")
    assert suspects(newcomer) == {(liar.id, CONTRADICTS)}


@in_virtual_time(MEMBERS)
async def test_a_convicted_member_proposes_no_view_any_more(herd):
    liar, judge = herd.nodes[LIAR], herd.nodes[0]
    judge.peer.membership.admission.convictions.receive(
        herd.nodes[1].id, Proven((proof_against(liar),))
    )
    next_view, key = judge.peer.membership.next_view, view_key(judge.view.number + 1)
    promised = next_view.open_decision().promised
    for number in range(1, 2 * MEMBERS):
        ballot = number, judge.view.peers.index(liar.id)
        next_view.receive(liar.id, liar.incarnation, Prepare(key, judge.view.hash, ballot))
    assert next_view.open_decision().promised == promised


@pytest.mark.parametrize("what", ["made up", "no proof", "of a stranger"])
def test_a_member_that_shows_what_proves_nothing_convicts_nobody(what):
    @in_virtual_time(MEMBERS)
    async def main(herd):
        liar, victim, honest = herd.nodes[LIAR], herd.nodes[0], honest_of(herd)
        raw = {
            "made up": proof_against(victim, signer=liar.identity),
            "no proof": b"\xff\xff",
            "of a stranger": msgspec.msgpack.encode(
                msgspec.structs.replace(
                    msgspec.msgpack.decode(proof_against(victim), type=Contradiction),
                    peer="12D3KooWnobody",
                )
            ),
        }[what]
        for node in honest:
            liar.peer.context.send(node.id, Proven((raw,)))
        await rounds_go_on(honest, 10)
        everybody = {node.id for node in herd.nodes.values()}
        assert all(node.members == everybody for node in honest)
        accused = {(liar.id, FALSE_PROOF)} if what == "made up" else set()
        assert all(suspects(node) == accused for node in honest)
        assert not any(node.peer.context.entrance.convicted for node in honest)

    main()


@pytest.mark.parametrize("liar", [0, 1], ids=["the senior one", "the junior one"])
@pytest.mark.parametrize("speaks", [True, False], ids=["it speaks", "it is silent"])
def test_of_two_voters_the_honest_one_goes_on_without_the_convicted(liar, speaks):
    """Its vote does not count in the quorum that puts it out."""

    async def main():
        herd = Divided()  # the senior one decides rounds alone, too
        await grown(herd, 2)
        node = herd.nodes[1 - liar]
        proof = proof_against(herd.nodes[liar])
        if not speaks:
            herd.network.cut(node.id, herd.nodes[liar].id)
        node.peer.membership.admission.convictions.receive(node.id, Proven((proof,)))
        await until(lambda: node.members == {node.id}, 30, "a view without the liar")
        assert node.peer.context.views.branch is None
        await rounds_go_on([node])
        await herd.end()

    run_virtual(main())


def test_one_of_three_goes_on_at_once_without_two_that_are_convicted():
    """The round that has begun needs their votes, and is given up."""

    async def main():
        herd = Divided()
        await grown(herd, 3)
        alone, *liars = herd.nodes.values()
        herd.network.partition({alone.id}, {liar.id for liar in liars})
        proofs = tuple(map(proof_against, liars))
        alone.peer.membership.admission.convictions.receive(alone.id, Proven(proofs))
        start, soon_s = alone.applied, LOST_S / 2
        await until(lambda: alone.members == {alone.id}, soon_s, "a view without the liars")
        await until(lambda: alone.applied >= start + 5, soon_s / 2, "rounds")
        assert alone.view.refoundings == 1
        await herd.end()

    run_virtual(main())


@in_virtual_time(3)
async def test_a_newcomer_follows_a_chain_whose_certificate_lacks_the_convicted(herd):
    senior, *others = herd.nodes.values()
    proof = proof_against(senior)
    for node in others:
        herd.network.cut(senior.id, node.id)
        node.peer.membership.admission.convictions.receive(node.id, Proven((proof,)))
    await until(lambda: are_without(others, senior.id), 30, "views without the liar")
    herd.start(3)
    newcomer = herd.nodes[3]
    await until(lambda: newcomer.id in others[0].members, 60, "its admission")
    await rounds_go_on([*others, newcomer])


def test_proofs_outlast_a_restart_of_all_that_hold_them():
    async def main():
        herd = Divided()
        herd.disks, herd.has_checkpoints = collections.defaultdict(MemoryStorage), True
        await grown(herd, MEMBERS)
        await convicted(herd)
        liar, honest = herd.nodes[LIAR], honest_of(herd)
        for node in honest:
            herd.kill(node.number)
        for node in honest:
            herd.start(node.number)
        for node in honest_of(herd):
            assert set(node.peer.context.entrance.convicted) == {liar.id}
        await until(lambda: all(node.peer.context.is_member for node in honest_of(herd)), 60, "all")
        await rounds_go_on(honest_of(herd))
        assert are_without(honest_of(herd), liar.id)
        await herd.end()

    run_virtual(main())


class FullDisk(MemoryStorage):
    """Storage that keeps nothing."""

    def write(self, name, content):
        raise OSError("no space left")


@in_virtual_time(2)
async def test_proofs_on_a_broken_disk_convict_nobody(herd):
    node, other = herd.nodes.values()
    sync, storage = node.peer.membership.admission.convictions, MemoryStorage()
    forged = proof_against(other, signer=node.identity)
    for kept in ([b"\xff"], {"proofs": 1}, [bytes(4096)], [forged]):
        storage.write(PROOFS, msgspec.msgpack.encode(kept))
        sync.remember(storage)
        assert not sync.proofs
    storage.write(PROOFS, b"\xff")
    sync.remember(storage)
    assert not sync.proofs


@in_virtual_time(2)
async def test_a_proof_holds_where_it_cannot_be_kept(herd):
    node, other = herd.nodes.values()
    sync = node.peer.membership.admission.convictions
    sync.remember(FullDisk())
    sync.receive(node.id, Proven((proof_against(other),)))
    assert list(sync.proofs) == [other.id]
