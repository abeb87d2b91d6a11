"""Three ends of an edge: a server before it, the trainer, and servers behind it.

Whatever is lost, doubled, late or forgotten, what is read is the trainer's m to the bit, or it is
asked for again.
"""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.activation_catalog import activation_codec
from farflock.compression.aqsgd import DIFFERENCE, FULL, HELD, KEPT, NO_TAG
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.node.pipeline.contrib.sample_memory import (
    Row,
    ServerMemory,
    TrainerMemory,
    _names,
    refers,
)
from farflock.node.pipeline.lifecycle.features import edge_ends
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Backward, Forward, Visit
from farflock.node.pipeline.server.edge_ends import NotHeld
from farflock.node.run.composition import value_bytes

LENGTH, WIDTH = 3, 16
EACH = LENGTH * WIDTH
# bytes of fp16, of int4 with a scale, of a kind and two tags
WHOLE, CHANGE, TAGS = (
    2 * EACH,
    EACH // 2 + 4,
    17,
)


def edges(batch=1, codec="aqsgd4", room=None, dtype=torch.float32):
    made = activation_codec(codec)
    made = made if room is None else dataclasses.replace(made, max_cache_bytes=room * 2 * EACH)
    return Edges(made, batch, LENGTH, WIDTH, 16, 7, dtype)


def normal(seed, batch=1):
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


class Edge:
    """The edge out of stage 0 into stage 1; behind it one server `b` per life; `number` counts."""

    def __init__(self, batch=1, room=None, codec="aqsgd4", caller="t"):
        self.edges, self.caller = edges(batch, codec, room), caller
        self.before, self.trainer = ServerMemory(self.edges), TrainerMemory(self.edges)
        self.behind = {"b/1": ServerMemory(self.edges)}
        self.number = 0

    def ask(self, samples):
        """A trainer's request to the server before it, and the outputs that it knew."""
        self.number += 1
        known = self.trainer.known(0, samples)
        return Forward(self.number, 0, -1, 5, known.visit), known

    def bring(self, samples, x):
        """One forward pass of the stage before: what the trainer has of it."""
        request, known = self.ask(samples)
        payload = self.before.output(self.caller, x, request)
        return self.trainer.received(payload, request, known), payload

    def hand(self, samples, rows, server="b/1", back=False):
        """The payload for the next server, and the values that it reads or the rows it lacks."""
        payload = self.trainer.handed(1, server, samples, rows)
        kind = Backward if back else Forward
        request = kind(
            self.number, 1, 0, 5, **({"attempt": 1} if back else {}), visit=Visit(samples)
        )
        try:
            found = self.behind[server].input(self.caller, payload, request)
        except NotHeld as lacking:
            self.trainer.taken(1, server, samples, rows, lacking.rows)
            return payload, lacking.rows
        self.trainer.taken(1, server, samples, rows)
        return payload, found


def m_of(rows):
    return torch.stack([row.values for row in rows]).float()


def kinds(payload, batch=1):
    return tuple(payload[:batch])


def test_a_first_visit_is_whole_both_ways_later_ones_are_differences_and_a_tag_on_the_way_back():
    edge, x = Edge(), normal(0)
    rows, reply = edge.bring((4,), x)
    assert torch.equal(m_of(rows), x.half().float())
    forward, read = edge.hand((4,), rows)
    assert torch.equal(read, m_of(rows))
    back, read = edge.hand((4,), rows, back=True)
    assert torch.equal(read, m_of(rows))
    assert (len(reply), len(forward), len(back)) == (TAGS + WHOLE, TAGS + WHOLE, TAGS)
    later, reply = edge.bring((4,), x + 0.01)
    forward, read = edge.hand((4,), later)
    assert torch.equal(read, m_of(later))
    assert kinds(reply) == kinds(forward) == (DIFFERENCE,)
    assert len(reply) == len(forward) == TAGS + CHANGE
    assert 0 < float((read - x - 0.01).abs().amax()) < 0.01
    assert edge.trainer.counts == {"whole samples": 1, "differences": 1, "not held": 0}


def test_a_microbatch_keeps_its_activation_while_other_visits_move_the_samples():
    """The law: both passes of a microbatch read the same bits, at any server, whatever passed."""
    edge = Edge()
    first, _ = edge.bring((4,), normal(0))
    edge.hand((4,), first)
    kept = m_of(first).clone()
    for seed in range(1, 4):
        later, _ = edge.bring((4,), normal(seed))
        edge.hand((4,), later)
    payload, lacking = edge.hand((4,), first, back=True)
    # it went whole at once, for another tag was known to be there
    if not isinstance(lacking, tuple):
        assert kinds(payload) == (KEPT,)
    assert torch.equal(edge.hand((4,), first, back=True)[1], kept)
    edge.behind["c/1"] = ServerMemory(edge.edges)
    assert torch.equal(edge.hand((4,), first, "c/1", back=True)[1], kept)


def test_a_lost_reply_costs_a_whole_sample_and_nothing_is_read_wrongly():
    edge = Edge()
    edge.hand((4,), edge.bring((4,), normal(0))[0])
    request, _ = edge.ask((4,))
    edge.before.output("t", normal(1), request)  # lost
    rows, reply = edge.bring((4,), normal(2))
    assert kinds(reply) == (KEPT,)
    assert torch.equal(m_of(rows), normal(2).half().float())
    assert kinds(edge.bring((4,), normal(3))[1]) == (DIFFERENCE,)


def test_two_visits_at_once_are_each_read_by_what_was_known_when_they_were_asked_for():
    edge = Edge()
    edge.bring((4,), normal(0))
    (one, knew_one), (two, knew_two) = edge.ask((4,)), edge.ask((4,))
    first, second = (
        edge.before.output("t", normal(seed), request) for seed, request in ((1, one), (2, two))
    )
    assert (kinds(first), kinds(second)) == ((DIFFERENCE,), (KEPT,))
    late = edge.trainer.received(second, two, knew_two)
    early = edge.trainer.received(first, one, knew_one)
    assert torch.equal(m_of(late), normal(2).half().float())
    assert float((m_of(early) - normal(1)).abs().amax()) < 0.5
    assert kinds(edge.bring((4,), normal(3))[1]) == (KEPT,), (
        "the trainer went back to the early one"
    )


@pytest.mark.parametrize("who", ["before", "trainer", "behind", "another life behind"])
def test_an_end_that_restarts_gets_samples_whole(who):
    edge = Edge()
    edge.hand((4,), edge.bring((4,), normal(0))[0])
    server = "b/2" if who == "another life behind" else "b/1"
    if who == "before":
        edge.before = ServerMemory(edge.edges)
    elif who == "trainer":
        edge.trainer = TrainerMemory(edge.edges)
    else:
        edge.behind = {server: ServerMemory(edge.edges)}
    rows, reply = edge.bring((4,), normal(1))
    assert kinds(reply) == ((KEPT,) if who in ("before", "trainer") else (DIFFERENCE,))
    payload, read = edge.hand((4,), rows, server)
    if who == "behind":
        assert read == (0,)
        assert refers(payload, read, 1)
        payload, read = edge.hand((4,), rows, server)
    assert kinds(payload) == (KEPT,)
    assert torch.equal(read, m_of(rows))
    assert kinds(edge.hand((4,), edge.bring((4,), normal(2))[0], server)[0]) == (DIFFERENCE,)


def test_only_the_rows_that_are_lacking_are_sent_again():
    edge = Edge(batch=2)
    edge.hand((4, 5), edge.bring((4, 5), normal(0, 2))[0])
    edge.behind["b/1"].received.forget(_names(edge.caller, 0, Visit((5,))))
    rows, _ = edge.bring((4, 5), normal(1, 2))
    payload, lacking = edge.hand((4, 5), rows)
    assert (kinds(payload, 2), lacking) == ((DIFFERENCE, DIFFERENCE), (1,))
    payload, read = edge.hand((4, 5), rows)
    assert kinds(payload, 2) == (HELD, KEPT)
    assert torch.equal(read, m_of(rows))


def test_a_sample_twice_in_a_microbatch_is_two_visits():
    edge = Edge(batch=2)
    for seed in range(3):
        rows, reply = edge.bring((4, 4), normal(seed, 2))
        payload, read = edge.hand((4, 4), rows)
        assert torch.equal(read, m_of(rows))
        assert (
            kinds(reply, 2) == kinds(payload, 2) == (KEPT if not seed else DIFFERENCE, DIFFERENCE)
        )
    _, read = edge.hand((4, 4), rows, back=True)
    assert isinstance(read, tuple) or torch.equal(read, m_of(rows))
    assert torch.equal(edge.hand((4, 4), rows, back=True)[1], m_of(rows))


def test_trainers_and_sources_have_samples_of_their_own():
    edge, other = Edge(), Edge(caller="u")
    other.before, other.behind = edge.before, edge.behind
    for seed in range(2):
        for one in (edge, other):
            rows, reply = one.bring((4,), normal(10 * seed + (one is other)))
            assert kinds(reply) == ((DIFFERENCE,) if seed else (KEPT,))
            assert torch.equal(one.hand((4,), rows)[1], m_of(rows))
    (row,) = rows
    request = Forward(1, 2, 1, 5, Visit((4,)))
    payload = TrainerMemory(edge.edges).handed(2, "b/1", (4,), (row,))
    assert torch.equal(edge.behind["b/1"].input("u", payload, request)[0], row.values.float())
    assert len(edge.behind["b/1"].received.cache) == 3


def test_memories_keep_to_their_bytes_and_what_finds_no_room_is_sent_whole_and_not_kept():
    edge = Edge(room=2)
    for visit in range(3):
        for sample in range(4):
            rows, reply = edge.bring((sample,), normal(visit))
            payload, read = edge.hand((sample,), rows)
            assert torch.equal(read, m_of(rows))
            first = KEPT if sample < 2 else FULL
            assert (
                kinds(reply)
                == kinds(payload)
                == ((DIFFERENCE,) if visit and sample < 2 else (first,))
            )
    assert (
        edge.trainer.held_bytes
        == edge.before.held_bytes
        == edge.behind["b/1"].held_bytes
        == 2 * 2 * EACH
    )
    assert edge.before.received.held_bytes == 0


def test_what_the_server_before_does_not_keep_the_trainer_forgets():
    edge = Edge(room=1)
    edge.bring((4,), normal(0))
    assert edge.trainer.held_bytes == 2 * EACH
    edge.before = ServerMemory(edge.edges)
    edge.before.output("u", normal(1), edge.ask((5,))[0])  # takes the room
    rows, reply = edge.bring((4,), normal(2))
    assert kinds(reply) == (FULL,)
    assert torch.equal(m_of(rows), normal(2).half().float())
    assert edge.trainer.held_bytes == 0
    assert edge.ask((4,))[0].visit.held == NO_TAG


def test_how_many_tags_of_servers_are_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("farflock.node.pipeline.contrib.sample_memory.MAX_SAMPLES", 3)
    edge = Edge()
    for sample in range(6):
        edge.hand((sample,), edge.bring((sample,), normal(sample))[0])
    assert list(edge.trainer._there[1]) == [("b/1", sample) for sample in (3, 4, 5)]


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["walk"] * 4
            + ["unheard", "unread", "late", "before", "trainer", "behind", "move", "back"]
        ),
        st.lists(st.integers(0, 4), min_size=2, max_size=2),
    ),
    max_size=40,
)


@settings(max_examples=80)
@given(events, st.integers(1, 6), st.integers(0, 2**20))
def test_every_end_reads_the_trainers_m_and_no_end_is_asked_three_times(script, room, seed):
    """Loss on either way, overtaking, restarts of any end, another server, small caches.

    Backward passes come much later.
    """
    edge, server, walked, waiting = Edge(batch=2, room=room), "b/1", [], None
    for step, (event, samples) in enumerate(script):
        samples, x = tuple(samples), normal(seed + step, 2)
        if event == "before":
            edge.before = ServerMemory(edge.edges)
        elif event == "trainer":
            edge.trainer, waiting = TrainerMemory(edge.edges), None
        elif event == "behind":
            edge.behind = {server: ServerMemory(edge.edges)}
        elif event == "move":
            server = f"c/{step}"
            edge.behind.setdefault(server, ServerMemory(edge.edges))
        elif event == "unheard":
            edge.before.output("t", x, edge.ask(samples)[0])
        elif event == "back" and walked:
            old, rows, meant = walked[seed % len(walked)]
            delivered(edge, old, rows, meant, server, back=True)
        elif event == "late" and waiting is None:
            request, known = edge.ask(samples)
            waiting = edge.before.output("t", x, request), request, known
        else:
            if waiting is not None:
                edge.trainer.received(*waiting)
                waiting = None
            rows, _ = edge.bring(samples, x)
            assert float((m_of(rows) - x).abs().amax()) < 1.5, (
                "four bits of the change between two normal draws"
            )
            if event == "unread":
                edge.trainer.handed(1, server, samples, rows)
            else:
                walked.append((samples, rows, m_of(rows).clone()))
                delivered(edge, *walked[-1], server)


def delivered(edge, samples, rows, meant, server, back=False):
    """It is read after at most two refusals: for what is missing, and for what that pushed out."""
    for _ in range(3):
        payload, read = edge.hand(samples, rows, server, back)
        if not isinstance(read, tuple):
            assert torch.equal(read, meant)
            return
        assert refers(payload, read, 2), "a whole sample was asked for again"
    raise AssertionError("it was asked for three times")


# messages that no honest peer sends


def test_a_difference_to_what_was_not_said_to_be_held_is_refused_by_the_trainer():
    edge = Edge()
    edge.bring((4,), normal(0))
    request, known = edge.ask((4,))
    payload = edge.before.output("t", normal(1), request)
    stranger = TrainerMemory(edge.edges)
    with pytest.raises(CorruptPayload, match="difference of sample 4 is not from the value"):
        stranger.received(payload, request, stranger.known(0, (4,)))
    assert stranger.held_bytes == 0
    spoilt = bytearray(payload)
    spoilt[-1] ^= 0x10
    with pytest.raises(CorruptPayload):
        edge.trainer.received(bytes(spoilt), request, known)
    tag = known.visit.held
    with pytest.raises(CorruptPayload):
        edge.trainer.received(bytes([HELD]) + tag + tag, request, known)
    assert torch.equal(
        edge.trainer.known(0, (4,)).entries[0].values.float(), normal(0).half().float()[0]
    )


@settings(max_examples=200)
@given(
    st.binary(max_size=TAGS + WHOLE + 2)
    | st.binary(min_size=16, max_size=16).map(lambda tags: b"\3" + tags)
)
def test_any_bytes_are_read_or_refused(raw):
    edge = Edge()
    edge.hand((4,), edge.bring((4,), normal(0))[0])
    request = Forward(1, 1, 0, 5, Visit((4,)))
    with contextlib.suppress(CorruptPayload, NotHeld):
        assert bool(edge.behind["b/1"].input("t", raw, request).isfinite().all())
    asked, known = edge.ask((4,))
    with contextlib.suppress(CorruptPayload):
        assert len(edge.trainer.received(raw, asked, known)) == 1


def test_an_output_that_is_not_finite_is_not_sent():
    edge = Edge()
    with pytest.raises(UnencodableTensor):
        edge.bring((4,), torch.full((1, LENGTH, WIDTH), float("nan")))


@pytest.mark.parametrize(
    ("codec", "request_", "why"),
    [
        ("int8", Forward(1, 0, -1, 5), None),
        ("int8", Forward(1, 0, -1, 5, Visit((1, 2))), "remembers none"),
        ("aqsgd4", Forward(1, 0, -1, 5), "needs the ids of 2 samples"),
        ("aqsgd4", Forward(1, 0, -1, 5, Visit((1,), bytes(8))), "needs the ids of 2"),
        ("aqsgd4", Forward(1, 0, -1, 5, Visit((1, 2), bytes(8))), "needs 16 bytes of tags"),
        ("aqsgd4", Forward(1, 0, -1, 5, Visit((1, 2), bytes(16))), None),
        (
            "aqsgd4",
            Backward(1, 0, -1, 5, 1, None, Visit((1, 2), bytes(16))),
            "needs 0 bytes of tags",
        ),
        ("aqsgd4", Backward(1, 0, -1, 5, 1, None, Visit((1, 2))), None),
        ("aqsgd4", Backward(1, 0, -1, 5, 1), "needs the ids of 2 samples"),
    ],
)
def test_samples_are_named_where_the_codec_remembers_and_nowhere_else(codec, request_, why):
    found = edge_ends(edges(2, codec)).misfit(request_)
    assert found is None if why is None else why in found


@pytest.mark.parametrize(
    ("rows", "excused"),
    [
        ((0,), True),
        ((1,), True),
        ((0, 1), True),
        ((2,), False),
        ((0, 2), False),
        ((3,), False),
        ((), False),
    ],
)
def test_a_server_that_lacks_a_row_sent_as_a_difference_may_say_so(rows, excused):
    payload = bytes([HELD, DIFFERENCE, KEPT]) + bytes(100)
    assert refers(payload, rows, 3) == excused


def test_a_row_goes_by_what_is_there():
    row = Row(normal(0)[0].half(), b"now" + bytes(5), b"before" + bytes(2), b"change", True)
    for there, kind, size in (
        (row.tag, HELD, 0),
        (row.before, DIFFERENCE, 6),
        (NO_TAG, KEPT, WHOLE),
        (b"x" * 8, KEPT, WHOLE),
    ):
        part = row.delta(there)
        assert (part.kind, len(part.payload), part.after) == (kind, size, row.tag)
    assert dataclasses.replace(row, kept=False).delta(NO_TAG).kind == FULL
    first = dataclasses.replace(row, before=NO_TAG, change=b"")
    assert first.delta(NO_TAG).kind == KEPT, "what was sent whole has no difference to nothing"


def test_what_a_microbatch_takes():
    assert value_bytes(2, LENGTH, WIDTH) == 2 * WHOLE == 2 * normal(0)[0].half().nbytes
