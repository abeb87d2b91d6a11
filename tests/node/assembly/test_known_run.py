"""What a joiner learns of a run before it takes part."""

import time
from dataclasses import replace

import pytest

from farflock.node.assembly import known_run
from farflock.node.assembly import learnt as learnt_terms
from farflock.node.assembly.peer_world import Clock, PeerWorld
from farflock.node.errors import RefusedByRun
from farflock.node.run.head import PROTOCOL, Head, run_id, seal_head
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import simulated_default
from farflock.node.run.model_section import ModelSection, UserModel
from farflock.node.run.user_terms import founded, wish
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.identity import Identity
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.virtual_time import run_virtual


class Directory:
    """A directory that has one head and the record of one member."""

    def __init__(self, head):
        self._head = head

    async def heads(self, run):
        return [self._head]

    async def peers(self, run):
        return [seal(FOUNDER, Record(run, FOUNDER.peer, 1, 1, curve=bytes(32)))]


class Links:
    """Links that learn records and do nothing else."""

    me = "a joiner"

    def learn(self, record):
        pass


FOUNDER = Identity.from_seed(bytes(32))
NODES = simulated_default(())
PROGRAMS = founded(wish(UserModel(2, 3, "ab" * 32, "SGD"), None, {}, {}))


@pytest.fixture
def learn(monkeypatch):
    """Learn the run of a manifest, whose members send `raw`."""

    def learnt(manifest, raw=None, model=ModelSection, protocol=PROTOCOL, own=False):
        sent = manifest.canonical() if raw is None else raw
        run = run_id(sent, FOUNDER.peer) if own else manifest.run_id(FOUNDER.peer)
        head = seal_head(FOUNDER, Head(run, FOUNDER.peer, bytes(32), len(sent), 0, protocol))
        invite = Invite(run, FOUNDER.peer, (), "", 0)

        async def fetch_chunk(*asked):
            return sent

        monkeypatch.setattr(learnt_terms, "fetch_chunk", fetch_chunk)
        world = PeerWorld(Links(), Directory(head), Clock(time.time))
        known = run_virtual(known_run.learn_run(world, invite, 5.0, model))
        assert known.head == head
        return known.manifest

    return learnt


def test_a_joiner_learns_the_manifest_of_its_invite(learn):
    assert learn(NODES) == NODES
    assert learn(PROGRAMS, model=UserModel) == PROGRAMS


@pytest.mark.parametrize(("here", "model"), [(NODES, ModelSection), (PROGRAMS, UserModel)])
def test_the_manifest_of_another_run_is_refused(learn, here, model):
    raw = here.canonical().replace(b"seed = ", b"seed = 9")
    with pytest.raises(
        RefusedByRun, match="the members sent the manifest of another run: its hash"
    ):
        learn(here, raw, model)


def test_an_invite_to_a_run_of_the_other_kind_names_the_way_in(learn):
    with pytest.raises(RefusedByRun, match=r"joined in another way.*`farflock join INVITE`"):
        learn(NODES, model=UserModel)
    with pytest.raises(RefusedByRun, match=r"joined in another way.*farflock\.SwarmOptimizer"):
        learn(PROGRAMS)


@pytest.mark.parametrize("raw", [b" ", b"\xff\xfe", b"[model]\ntensors = 1\n", b"[model", b"a=1"])
@pytest.mark.parametrize("model", [ModelSection, UserModel])
def test_anything_else_that_members_send_is_refused(learn, raw, model):
    for own in (False, True):  # those of another run, or nonsense that its founder has signed
        with pytest.raises(RefusedByRun):
            learn(NODES if model is ModelSection else PROGRAMS, raw, model, own=own)


def test_terms_that_are_not_in_the_form_that_is_hashed_are_refused(learn):
    with pytest.raises(RefusedByRun, match="not in the form that is hashed"):
        learn(NODES, b"# by hand\n" + NODES.canonical(), own=True)


def test_an_invite_of_an_earlier_protocol_is_refused_before_its_terms_are_read(learn):
    with pytest.raises(RefusedByRun) as refusal:
        learn(PROGRAMS, b"in another language", UserModel, protocol=9)
    assert str(refusal.value) == (
        f"the run has another protocol: it speaks version 9, this program version {PROTOCOL};"
        " use the version of farflock that made it"
    )


def test_a_joiner_asks_for_the_list_of_the_run_s_tensors_only_if_its_own_is_another(monkeypatch):
    raw, asked = b"the run's list", []
    known = known_run.own_run(FOUNDER, PROGRAMS, raw)
    record = seal(FOUNDER, Record(known.run, FOUNDER.peer, 1, 1, curve=bytes(32)))

    async def fetch_chunk(links, run, digest, size, members, timeout_s):
        asked.append((digest, size, members))
        return raw

    monkeypatch.setattr(known_run, "fetch_chunk", fetch_chunk)

    def listed(known, ours):
        return run_virtual(known_run.listed_by_members(Links(), known, ours))

    assert listed(replace(known, records=[record]), raw) == b""
    assert listed(known, b"other") == b""
    assert asked == []
    assert listed(replace(known, records=[record]), b"other") == raw
    assert asked == [(digest_of(raw), len(raw), [FOUNDER.peer])]
    unlisted = known_run.own_run(FOUNDER, PROGRAMS)
    assert listed(replace(unlisted, records=[record]), b"other") == b""
    assert len(unlisted.head) < len(known.head)


def known():
    return known_run.own_run(FOUNDER, NODES)


def test_a_peer_that_was_in_the_run_knows_its_terms_from_its_folder(tmp_path):
    run = NODES.run_id(FOUNDER.peer)
    known_run.keep_terms(tmp_path / "terms", known())
    invite = Invite(run, FOUNDER.peer, (), "", 0)
    before = known_run.kept_terms(tmp_path / "terms", invite)
    assert known_run.read_run(before).manifest == NODES
    assert before.head == known().head
    for other in (replace(invite, run="0" * 32), replace(invite, founder="somebody")):
        assert known_run.kept_terms(tmp_path / "terms", other) is None


def test_spoilt_terms_in_a_folder_are_none(tmp_path):
    path, invite = tmp_path / "terms", Invite(NODES.run_id(FOUNDER.peer), FOUNDER.peer, (), "", 0)
    assert known_run.kept_terms(path, invite) is None
    known_run.keep_terms(path, known())
    raw = path.read_bytes()
    for spoilt in (raw[:-1], raw[:40] + b"x" + raw[41:], b"junk", bytes(10**6)):
        path.write_bytes(spoilt)
        assert known_run.kept_terms(path, invite) is None
