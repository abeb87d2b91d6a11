"""Signed evaluations: who is drawn, what is taken in, and how a missing one is asked for."""

import collections
import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_EVALUATION_BYTES, Evaluated, EvaluationQuery
from farflock.swarm.peer.evaluations import (
    AHEAD,
    ASK_S,
    ASKED,
    KEPT,
    MAX_ASKED_TIMES,
    REPEATED,
    BadEvaluation,
    Evaluation,
    Evaluations,
    EvaluationSchedule,
    decode_evaluation,
    drawn,
    evaluation_domain,
    stage_of_stream,
)
from farflock.swarm.protocol.views import Certified, Chain, Member, View, genesis
from farflock.swarm.roles import EVERY, NOTHING

RUN, SEED, STREAM = "run", 7, "delta"
KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
MEMBERS = tuple(Member(key.peer, 1) for key in KEYS[:3])
OK = Evaluation("", 0, b"", 0, "ok", 3.5, 0.1, 16, 640, 1.5, 900.0, 0.8)


class Port:
    """The part of a peer's context that evaluations need; `network` carries messages at once."""

    run, seed, incarnation = RUN, SEED, 1

    def __init__(self, key, network, members=MEMBERS):
        self.me, self.network = key.peer, network
        first = genesis(RUN, members[0])
        self.views = Chain(RUN, [Certified(View(1, first.hash, 0, members))])
        self.counters, self.lives = collections.Counter(), {}
        self.sent = []

    def now(self):
        return self.network.time_s

    def send(self, peer, message):
        self.sent.append((peer, message))
        self.network.carry(self.me, peer, message)

    def my_index(self, view):
        return view.index(self.me, self.incarnation)

    def life(self, peer):
        return self.lives.get(peer, "alive")

    def drop(self, reason):
        self.counters[reason] += 1


class Network:
    """Three members, and which of them hear nothing at the moment."""

    def __init__(self):
        self.time_s, self.deaf = 0.0, set()
        self.ports = {key.peer: Port(key, self) for key in KEYS[:3]}
        self.peers = {key.peer: Evaluations(self.ports[key.peer], key) for key in KEYS[:3]}
        for each in self.peers.values():
            each.open(EvaluationSchedule(STREAM, 5), -1)

    def carry(self, sender, peer, message):
        if peer not in self.deaf and peer in self.peers:
            self.peers[peer].receive(sender, 1, message)

    def reached(self, number):
        for each in self.peers.values():
            each.reached(number)

    def measured(self, number, value=OK):
        """Let the members that are drawn for a round say a value."""
        for each in self.peers.values():
            if (place := each.mine(number)) is not None:
                each.say(number, place, value)

    def pass_time(self, seconds):
        for _ in range(int(seconds * 10)):
            self.time_s += 0.1
            for each in self.peers.values():
                each.tick()


def view_of(network):
    return network.ports[KEYS[0].peer].views.newest


def signed(key, value, view, number=0, place=0, stream=STREAM, run=RUN):
    said = msgspec.structs.replace(value, stream=stream, round=number, view=view.hash, place=place)
    body = msgspec.msgpack.encode(said)
    return key.sign(evaluation_domain(run), body) + body


def key_of(member):
    return next(key for key in KEYS if key.peer == member.peer)


def test_a_value_is_taken_in_by_all_and_is_equal_at_all():
    network = Network()
    network.reached(0)
    network.measured(0)
    known = [dict(each.known) for each in network.peers.values()]
    assert known[0] == known[1] == known[2]
    assert set(known[0]) == {(0, 0), (0, 1)}  # the first evaluation is one of those repeated
    first, second = drawn(SEED, view_of(network), 0)
    signers = [network.peers[KEYS[0].peer].signer((0, place)) for place in (0, 1)]
    assert signers == [first.peer, second.peer]
    assert first != second


def test_one_in_ten_is_repeated():
    schedule = EvaluationSchedule(STREAM, 5, stride=2, first=1)
    due = [number for number in range(1000) if schedule.is_due(number)]
    assert due == list(range(1, 1000, 10))
    assert [number for number in due if schedule.is_repeated(number)] == due[::REPEATED]
    assert not any(map(schedule.is_repeated, set(range(1000)) - set(due)))


@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(-1, 60),
    st.integers(-1, 90),
)
def test_the_rounds_between_two_are_those_that_are_due(every, stride, first, after, last):
    schedule = EvaluationSchedule(STREAM, every, stride, first)
    due = [number for number in range(after + 1, last + 1) if schedule.is_due(number)]
    assert schedule.between(after, last) == due[-KEPT:]


def test_only_the_newest_rounds_are_between():
    rounds = EvaluationSchedule(STREAM, 3).between(-1, 10**15)
    assert len(rounds) == KEPT
    assert rounds[-1] == 10**15 - 10**15 % 3


@given(st.integers(1, 8), st.integers(0, 2**31), st.integers(0, 2**62))
def test_the_draw_is_a_function_of_seed_view_and_round(count, seed, number):
    members = tuple(Member(f"peer {index}", 1) for index in range(count))
    view = View(1, bytes(32), 0, members)
    again = View(1, bytes(32), 0, members)
    chosen = drawn(seed, view, number)
    assert chosen == drawn(seed, again, number)
    assert len(set(chosen)) == min(count, 2)
    assert set(chosen) <= set(members)


def test_the_draw_is_fair():
    view = View(1, bytes(32), 0, MEMBERS)
    pairs = collections.Counter(drawn(SEED, view, number) for number in range(3000))
    assert len(pairs) == 6
    assert all(400 < count < 600 for count in pairs.values())


def test_any_member_of_a_pipeline_may_be_drawn():
    members = tuple(
        Member(key.peer, 1, role) for key, role in zip(KEYS[:3], (0, NOTHING, EVERY), strict=True)
    )
    view = View(1, bytes(32), 0, members)
    first = {drawn(SEED, view, number, 0)[0] for number in range(50)}
    assert first == set(members)
    assert drawn(SEED, view, 3) == (members[2],)


@pytest.mark.parametrize(
    ("stream", "stage"),
    [("grad/0", 0), ("fragment1/12", 12), ("grad", None), ("grad/", None), ("grad/01", None)],
)
def test_a_stream_of_a_stage_is_known_by_its_name(stream, stage):
    assert stage_of_stream(stream) == stage


def test_no_round_of_a_stage_is_repeated():
    schedule = EvaluationSchedule("grad/0", 5)
    assert schedule.is_due(0)
    assert not any(schedule.is_repeated(number) for number in range(200))


def test_only_the_drawn_member_of_a_pipeline_is_believed_and_nobody_repeats():
    network = Network()
    for each in network.peers.values():
        each.open(EvaluationSchedule("grad/0", 5), 10)
    view, me = view_of(network), network.peers[KEYS[0].peer]
    first, second = (key_of(member) for member in drawn(SEED, view, 5, 0))
    for key, place in ((second, 0), (second, 1), (KEYS[3], 0)):
        blob = signed(key, OK, view, 5, place, "grad/0")
        me.receive(second.peer, 1, Evaluated((blob,)))
    me.receive(first.peer, 1, Evaluated((signed(first, OK, view, 5, 0, "grad/1"),)))
    assert not me.known
    me.receive(second.peer, 1, Evaluated((signed(first, OK, view, 5, 0, "grad/0"),)))
    assert set(me.known) == {(5, 0)}


def test_a_round_of_a_stage_belongs_to_the_view_of_its_own_axis():
    """Of two views, the second begins at round 0 for whole models and at 7 for the stage."""
    network = Network()
    for port in network.ports.values():
        (certified,) = port.views.views
        later = View(2, certified.view.hash, 0, MEMBERS[::-1], (7,))
        port.views.views.append(Certified(later))
    for each in network.peers.values():
        each.open(EvaluationSchedule("grad/0", 5), 10)
    network.measured(5)
    network.measured(10)
    first, second = (entry.view for entry in network.ports[KEYS[0].peer].views.views)
    for each in network.peers.values():
        assert each.known[5, 0].view == first.hash
        assert each.known[10, 0].view == second.hash
        assert each.signer((5, 0)) == drawn(SEED, first, 5, 0)[0].peer
    port = Port(KEYS[3], network)
    port.views = network.ports[KEYS[0].peer].views
    network.peers[port.me] = visitor = Evaluations(port, KEYS[3])
    visitor.look_on(KEYS[0].peer)
    assert visitor.known == network.peers[KEYS[0].peer].known


def test_only_members_with_the_whole_model_are_drawn():
    members = (Member("a", 1, 0), Member("b", 1, EVERY), Member("c", 1, NOTHING))
    assert drawn(SEED, View(1, bytes(32), 0, members), 3) == (members[1],)
    assert drawn(SEED, View(1, bytes(32), 0, members[:1]), 3) == ()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("another member's signature", "evaluation that is wrong"),
        ("a stranger's signature", "evaluation that is wrong"),
        ("the second's value in the first's place", "evaluation that is wrong"),
        ("a signature of another run", "evaluation that is wrong"),
        ("a loss that is no number", "evaluation that is wrong"),
        ("a negative loss", "evaluation that is wrong"),
        ("an infinite error", "evaluation that is wrong"),
        ("bytes", "evaluation that is wrong"),
        ("a round that is not due", "evaluation that is not due"),
        ("a round far ahead", "evaluation that is not due"),
        ("a repetition that is not due", "evaluation that is not due"),
        ("another stream", "evaluation that is not due"),
        ("another view", "evaluation that is not due"),
    ],
)
def test_a_lie_is_dropped_and_counted(lie, reason):
    network = Network()
    network.reached(5)
    view = view_of(network)
    first, second = map(key_of, drawn(SEED, view, 5))
    third = next(key for key in KEYS[:3] if key not in (first, second))
    ahead = 5 + 5 * (AHEAD + 1)
    blob = {
        "another member's signature": signed(third, OK, view, 5),
        "a stranger's signature": signed(KEYS[3], OK, view, 5),
        "the second's value in the first's place": signed(second, OK, view, 5),
        "a signature of another run": signed(first, OK, view, 5, run="other"),
        "a loss that is no number": signed(first, changed(loss=float("nan")), view, 5),
        "a negative loss": signed(first, changed(loss=-1.0), view, 5),
        "an infinite error": signed(first, changed(standard_error=float("inf")), view, 5),
        "bytes": b"x" * MAX_EVALUATION_BYTES,
        "a round that is not due": signed(key_of(drawn(SEED, view, 4)[0]), OK, view, 4),
        "a round far ahead": signed(key_of(drawn(SEED, view, ahead)[0]), OK, view, ahead),
        "a repetition that is not due": signed(second, OK, view, 5, place=1),
        "another stream": signed(first, OK, view, 5, stream="other"),
        "another view": signed(first, OK, View(2, view.hash, 0, MEMBERS), 5),
    }[lie]
    victim = network.peers[third.peer]
    victim.receive(first.peer, 1, Evaluated((blob,)))
    assert not victim.known
    assert network.ports[third.peer].counters[reason] == 1


def changed(**fields):
    return msgspec.structs.replace(OK, **fields)


def test_the_truth_in_the_place_of_each_lie_is_taken_in():
    network = Network()
    network.reached(5)
    view = view_of(network)
    first = key_of(drawn(SEED, view, 5)[0])
    blob = signed(first, OK, view, 5)
    for key in KEYS[:3]:
        network.peers[key.peer].receive(KEYS[3].peer, 1, Evaluated((blob,)))  # whoever brings it
        assert network.peers[key.peer].known[5, 0].loss == OK.loss


def test_a_member_that_signs_two_values_is_counted_and_all_keep_the_same_one():
    network = Network()
    network.reached(5)
    view = view_of(network)
    first = key_of(drawn(SEED, view, 5)[0])
    blobs = [signed(first, changed(loss=loss), view, 5) for loss in (3.0, 9.0)]
    others = [key.peer for key in KEYS[:3] if key is not first]
    for peer, order in zip(others, (blobs, blobs[::-1]), strict=True):
        for blob in order:
            network.peers[peer].receive(first.peer, 1, Evaluated((blob, blob)))
    kept = [network.peers[peer].known[5, 0] for peer in others]
    assert kept[0] == kept[1]
    for peer in others:
        assert network.ports[peer].counters["second evaluation of a round by one member"] >= 1


def test_a_replayed_value_changes_nothing():
    network = Network()
    network.reached(0)
    network.measured(0)
    victim = network.peers[KEYS[0].peer]
    port = network.ports[KEYS[1].peer]
    blobs = [blob for _, said in port.sent for blob in getattr(said, "values", ())]
    before = dict(victim.known)
    victim.fresh.clear()
    network.reached(KEPT * 5 + 5)  # now it is too old
    victim.receive(KEYS[1].peer, 1, Evaluated(tuple(blobs)))
    assert not victim.known
    assert before
    assert not victim.fresh


def test_a_lost_value_is_asked_for():
    network = Network()
    network.reached(5)
    view = view_of(network)
    first = drawn(SEED, view, 5)[0].peer
    network.deaf = {key.peer for key in KEYS[:3]} - {first}
    network.measured(5)
    network.deaf = set()
    deaf = next(peer for peer in network.peers if peer != first)
    assert not network.peers[deaf].known
    network.pass_time(4 * ASK_S)
    assert all((5, 0) in each.known for each in network.peers.values())


def test_a_value_that_nobody_has_is_not_asked_for_for_ever():
    network = Network()
    network.reached(0)
    first = drawn(SEED, view_of(network), 0)[0].peer
    asking = next(peer for peer in network.peers if peer != first)
    network.pass_time(ASK_S * 2 ** (MAX_ASKED_TIMES + 1))
    queries = [said for _, said in network.ports[asking].sent if isinstance(said, EvaluationQuery)]
    assert len(queries) == ASKED * MAX_ASKED_TIMES


def test_a_newcomer_gets_what_the_others_keep():
    network = Network()
    for number in range(0, 5 * (KEPT + 10), 5):
        network.reached(number)
        network.measured(number)
    late = Port(KEYS[3], network)
    network.ports[late.me] = late
    network.peers[late.me] = Evaluations(late, KEYS[3])
    last = 5 * (KEPT + 9)
    network.peers[late.me].open(EvaluationSchedule(STREAM, 5), last)
    network.pass_time(10 * ASK_S)
    theirs, mine = network.peers[KEYS[1].peer].known, network.peers[late.me].known
    assert mine == theirs
    assert len({number for number, _ in theirs}) == KEPT


def test_a_visitor_that_knows_no_schedule_takes_in_what_members_signed():
    network = Network()
    network.reached(5)
    network.measured(0)
    network.measured(5)
    port = Port(KEYS[3], network)
    network.peers[port.me] = visitor = Evaluations(port, KEYS[3])
    view = view_of(network)
    visitor.receive(KEYS[3].peer, 1, Evaluated((signed(KEYS[3], OK, view, 5),)))
    assert not visitor.known
    visitor.look_on(KEYS[0].peer)
    assert visitor.known == network.peers[KEYS[0].peer].known
    visitor.receive(KEYS[3].peer, 1, Evaluated((signed(KEYS[3], changed(loss=1.0), view, 5),)))
    assert visitor.known[5, 0].loss == OK.loss


def test_a_missing_value_is_expected_only_of_a_member_that_is_here():
    network = Network()
    network.reached(5)
    first = drawn(SEED, view_of(network), 5)[0].peer
    other = next(peer for peer in network.peers if peer != first)
    assert network.peers[other].lacks(5)
    assert not network.peers[first].lacks(5)
    network.ports[other].lives[first] = "dead"
    assert not network.peers[other].lacks(5)


@given(st.binary(max_size=MAX_EVALUATION_BYTES))
def test_any_bytes_are_refused(blob):
    with pytest.raises(BadEvaluation):
        decode_evaluation(blob)


@given(
    st.floats(0, 1e6),
    st.floats(0, 10),
    st.one_of(st.none(), st.floats(0, 1e30)),
    st.integers(0, 64),
)
def test_a_signed_value_comes_back(loss, error, norm, sequences):
    value = changed(loss=loss, standard_error=error, gradient_norm=norm, sequences=sequences)
    blob = signed(KEYS[0], value, View(1, bytes(32), 0, MEMBERS))
    assert len(blob) <= MAX_EVALUATION_BYTES
    back = decode_evaluation(blob)
    assert msgspec.structs.replace(back, stream="", view=b"") == value


def test_the_domain_of_a_signature_names_the_run():
    assert evaluation_domain("a") != evaluation_domain("b")
    assert hashlib.sha256(b"a").digest()[:16] in evaluation_domain("a")
