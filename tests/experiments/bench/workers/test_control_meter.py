"""What peers say and compute is counted where it happens, once, and at the peer that does it."""

import typing

import msgspec
import pytest

from farflock.experiments.bench.workers import control_meter
from farflock.experiments.bench.workers.control_meter import (
    GoodSignatures,
    Meter,
    Stopwatch,
    acting,
    replaced,
    signature_bytes,
)
from farflock.swarm import identity, record
from farflock.swarm.frame import Frame, pack
from farflock.swarm.identity import Identity, verify
from farflock.swarm.messages import (
    Accepted,
    Decided,
    Ground,
    Join,
    Key,
    Message,
    Piece,
    Ping,
    Promise,
    Propose,
    Signature,
    Statements,
    Views,
)
from farflock.swarm.protocol.views import Member, encode, founded

KEY, VIEW, PROOF = Key("weights", 3), bytes(32), b"s" * 64
FOUNDER = Identity.from_seed(bytes(32))


def signed_fields():
    """The names of all fields of messages that hold signatures."""
    for message in typing.get_args(Message):
        tag = message.__struct_config__.tag
        hints = typing.get_type_hints(message, include_extras=True)
        names = {name for name, hint in hints.items() if repr(Signature) in repr(hint)}
        assert not names or tag in control_meter.SIGNED
        yield from names


def test_all_fields_that_hold_signatures_are_counted():
    assert set(signed_fields()) <= set(control_meter.EVIDENCE)
    assert {"proof", "proofs", "refusals"} <= set(signed_fields())


@pytest.mark.parametrize(
    "without",
    [
        Accepted(KEY, VIEW, (0, 1)),
        Promise(KEY, VIEW, (1, 1)),
        Decided(KEY, VIEW, b"value", (0, 1)),
        Propose(KEY, VIEW, (1, 1), b"value"),
        Join(b""),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_evidence_adds_to_a_message_is_counted(without):
    more = {
        "proof": PROOF,
        "proofs": ((0, PROOF), (1, PROOF)),
        "grounds": (Ground(0, (), PROOF),),
        "refusals": ((2, PROOF),),
        "capability": b"c" * 200,
    }
    names = more.keys() & set(without.__struct_fields__)
    said = msgspec.structs.replace(without, **{name: more[name] for name in names})
    added = signature_bytes(said) - signature_bytes(without)
    frames = len(pack(Frame(1, said))) - len(pack(Frame(1, without)))
    assert added == pytest.approx(frames, abs=2 * len(names))  # empty fields take a byte or two
    assert added >= 64


def test_certificates_of_views_statements_and_records_count_too():
    certified = founded("run", FOUNDER, Member(FOUNDER.peer, 1))
    assert 64 <= signature_bytes(Views((encode(certified),))) < 80
    assert signature_bytes(Views((), (b"l" * 90,))) == 90
    assert signature_bytes(Statements((b"v" * 100,))) == 100
    assert signature_bytes(Join(b"r" * 100)) == 64
    assert signature_bytes(Ping(0.0)) == 0
    assert {"views", "said", "evaluated", "join", "accepted"} <= control_meter.SIGNED
    assert "ping" not in control_meter.SIGNED


class Clock:
    """A clock that shows what it is told."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_moment_is_charged_to_the_innermost_work():
    clock = Clock()
    watch = Stopwatch(clock)

    def sign():
        clock.now_s += 2.0
        return "signed"

    def vote(before_s, after_s):
        clock.now_s += before_s
        signed = watch.timed("signing", sign)()
        clock.now_s += after_s
        return signed

    assert watch.timed("protocol", vote)(1.0, after_s=4.0) == "signed"
    clock.now_s += 8.0  # nobody's
    assert watch.spent_s == {"protocol": 5.0, "signing": 2.0}
    assert watch.calls == {"protocol": 1, "signing": 1}
    watch.clear()
    assert not watch.spent_s
    assert not watch.calls


def test_work_may_depend_on_the_arguments():
    watch = Stopwatch(Clock())
    handle = watch.timed(lambda kind: "content" if kind == "piece" else "protocol", len)
    assert [handle(kind) for kind in ("piece", "holds", "offer")] == [5, 5, 5]
    assert watch.calls == {"content": 1, "protocol": 2}


def test_work_that_fails_is_charged_as_well():
    clock = Clock()
    watch = Stopwatch(clock)

    def fail():
        clock.now_s += 1.0
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        watch.timed("checking", fail)()
    clock.now_s += 1.0
    assert watch.spent_s == {"checking": 1.0}


def test_what_was_replaced_comes_back_even_after_a_failure():
    before = identity.MAX_REMEMBERED
    with pytest.raises(ValueError, match="wrong"), replaced([(identity, "MAX_REMEMBERED", 7)]):
        assert identity.MAX_REMEMBERED == 7
        raise ValueError("wrong")
    assert before == identity.MAX_REMEMBERED


def test_each_peer_checks_a_signature_itself_once():
    signed, good = FOUNDER.sign(b"kind", b"text"), GoodSignatures()
    with replaced([(identity, "_good", good)]):
        for peer in ("a", "b", "a", "b"):
            with acting(peer):
                assert verify(FOUNDER.peer, b"kind", b"text", signed)
    assert good.checks == 2


def test_each_peer_forgets_only_its_own_signatures():
    good = GoodSignatures()
    replacements = [(identity, "_good", good), (identity, "MAX_REMEMBERED", 2)]
    with replaced(replacements):
        for peer, text in (("a", b"1"), ("b", b"1"), ("a", b"2"), ("a", b"3")):
            with acting(peer):
                assert verify(FOUNDER.peer, b"kind", text, FOUNDER.sign(b"kind", text))
    with acting("a"):
        assert len(good) == 1, "it was full before the third"
    with acting("b"):
        assert len(good) == 1


def test_a_meter_times_signatures_where_modules_have_names_of_their_own_for_checking():
    meter, blob = Meter(), record.Record("run", FOUNDER.peer, 1, 1, curve=bytes(32))
    with meter.on():
        record.seal(FOUNDER, blob)  # signs, and reads what it signed
    assert meter.watch.calls == {"signing": 1, "checking": 1}
    assert meter.remembered.checks == 1
    assert meter.watch.spent_s["checking"] > 0
    assert record.verify is verify


def test_content_and_control_are_counted_apart():
    meter = Meter()
    said = pack(Frame(1, Accepted(KEY, VIEW, (0, 1), PROOF)))
    meter.count("a", pack(Frame(1, Piece(VIEW, 0, 3), b"abc")), lambda frame: 1000)
    meter.count("a", said, lambda frame: 1000)
    meter.count("b", pack(Frame(1, Ping(0.0))), lambda frame: 1000)
    assert meter.content_bytes == 1000
    assert meter.control["accepted"] == len(said)
    assert set(meter.control) == {"accepted", "ping"}
    assert meter.signatures["accepted"] == meter.signers["a"] > 64
    assert meter.signers["b"] == 0
    meter.clear()
    assert not meter.content_bytes + meter.control.total() + meter.signers.total()


def test_a_signature_takes_some_time():
    assert all(0 < each_s < 0.1 for each_s in control_meter.signature_s(3))
