"""The codec that a trainer takes between two stages, and its servers, by what the servers read."""

import logging
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.activation_catalog import activation_codec
from farflock.compression.subspace import Basis
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.swarm.messages import CodecId
from farflock.swarm.paths.round_robin import Announced

INT4, INT8, BF16 = (CodecId(name, 1) for name in ("int4,int8", "int8,int8", "bf16,bf16"))
RUN = ("int4", "int8", "bf16")
LIFE = 7


def edges(*names):
    codec, *others = map(activation_codec, names)
    return Edges(codec, 1, 4, 8, 16, 0, others=tuple(others))


def servers(*peers):
    return [Announced(peer, LIFE) for peer in peers]


def codecs(told, names=RUN):
    return EdgeCodecs(edges(*names), lambda peer, life: told.get(peer) if life == LIFE else None)


def test_the_first_that_all_of_both_stages_read_is_taken():
    told = {"a": (INT4, INT8, BF16), "b": (INT8, INT4), "c": (INT4, INT8), "d": (BF16, INT8)}
    made = codecs(told)
    assert made.choose(servers("a", "b"), servers("c"), None) == INT4
    assert made.choose(servers("a", "b"), servers("c", "d"), None) == INT8
    assert made.choose(servers("d"), servers("d"), None) == INT8


def test_a_silent_server_is_taken_to_read_every_codec():
    assert codecs({}).choose(servers("a"), servers("b"), None) == INT4
    assert codecs({"a": (INT8,)}).choose(servers("a", "x"), servers("y"), None) == INT8


def test_a_server_that_cannot_read_the_input_has_no_say_in_the_output():
    told = {"old": (INT8,), "new": (INT4, INT8), "next": (INT4, INT8)}
    assert codecs(told).choose(servers("old", "new"), servers("next"), INT4) == INT4
    assert codecs(told).choose(servers("old", "new"), servers("next"), INT8) == INT8


def test_without_one_that_all_read_it_is_one_that_some_of_both_read_and_it_is_said_once(caplog):
    told = {"a": (INT4,), "b": (INT8,), "c": (INT8,)}
    made = codecs(told)
    with caplog.at_level(logging.WARNING):
        assert made.choose(servers("a", "b"), servers("c"), None) == INT8
        assert made.choose(servers("a", "b"), servers("c"), None) == INT8
    assert len(caplog.records) == 1
    assert "some get no work" in caplog.text


def test_without_any_the_preferred_one_is_asked_for_and_a_server_that_refuses_says_why():
    assert codecs({"a": (INT8,), "b": (BF16,)}).choose(servers("a"), servers("b"), None) == INT4


def test_a_trainer_asks_for_nothing_that_it_does_not_know():
    told = {"a": (INT4, INT8, BF16), "b": (INT4, INT8, BF16)}
    assert codecs(told, ("int8", "bf16")).choose(servers("a"), servers("b"), None) == INT8


@dataclass(frozen=True)
class Newer:
    """Another release's int8, which reads and writes version 2."""

    version = 2
    name, scope, digest = "int8,int8", "memoryless", b""

    def offers(self, epoch):
        return activation_codec("int8").offers(epoch)[0].__class__(self.name, 2), *activation_codec(
            "int8"
        ).offers(epoch)


def test_of_a_codec_that_version_is_spoken_which_both_know():
    old, new = CodecId("int8,int8", 1), CodecId("int8,int8", 2)
    mine = Edges(Newer(), 1, 4, 8, 16, 0, others=(activation_codec("int8"),))
    told = {"old": (old,), "new": (new, old), "newest": (new,)}
    made = EdgeCodecs(mine, lambda peer, life: told[peer])
    assert made.choose(servers("new"), servers("new"), None) == new
    assert made.choose(servers("new"), servers("old"), None) == old
    assert made.unfit(servers("old", "new", "newest"), (new, None)) == {"old"}
    assert made.unfit(servers("old", "new", "newest"), (old, None)) == {"newest"}
    assert mine.knows(new)
    assert mine.knows(old)
    assert not mine.knows(CodecId("int8,int8", 3))


def test_only_servers_that_read_all_parts_of_a_pass_are_asked():
    told = {"a": (INT4, INT8), "b": (INT8,), "c": (INT4,)}
    made = codecs(told)
    assert made.unfit(servers("a", "b", "c"), (INT4, INT8)) == {"b", "c"}
    assert made.unfit(servers("a", "b", "c"), (None, INT8)) == {"c"}
    assert made.unfit(servers("a", "b", "c"), (None, None)) == set()


def test_a_silent_server_may_be_asked_and_if_none_reads_it_any_may():
    made = codecs({"a": (INT8,), "b": (INT4,)})
    assert made.unfit(servers("a", "b", "silent"), (INT4,)) == {"a"}
    assert made.unfit(servers("a", "silent"), (INT4,)) == {"a"}
    assert made.unfit(servers("a"), (INT4,)) == set(), "its refusal says why"
    assert made.unfit([], (INT4,)) == set()


SOME = st.none() | st.sets(st.sampled_from([INT4, INT8, BF16])).map(tuple)


@given(
    st.lists(SOME, min_size=1, max_size=4),
    st.lists(SOME, min_size=1, max_size=4),
    st.none() | st.just(INT8),
)
def test_whatever_is_said_the_choice_is_the_first_that_all_read_if_there_is_one(
    senders, receivers, came
):
    told = {f"s{index}": reads for index, reads in enumerate(senders)}
    told |= {f"r{index}": reads for index, reads in enumerate(receivers)}
    before = servers(*(f"s{index}" for index in range(len(senders))))
    after = servers(*(f"r{index}" for index in range(len(receivers))))
    chosen = codecs(told).choose(before, after, came)
    able = [reads for reads in senders if reads is not None and (came is None or came in reads)]
    said = able + [reads for reads in receivers if reads is not None]
    everybodys = [one for one in (INT4, INT8, BF16) if all(one in reads for reads in said)]
    assert chosen == everybodys[0] if everybodys else chosen in (INT4, INT8, BF16)


def test_in_a_subspace_a_server_without_the_sender_s_version_is_not_asked():
    first = Basis.drawn(8, 2, 2).with_tables(torch.zeros(16, 8))
    codec = SubspaceVersions(activation_codec("subspace:2", basis=first))
    mine = Edges(codec, 1, 4, 8, 16, 0)
    (one,) = mine.reads
    assert (one.version, one.digest) == (1, first.digest[:8])
    later = CodecId(one.name, 2, bytes(8))
    told = {"both": (later, one), "one": (one,)}
    made = EdgeCodecs(mine, lambda peer, life: told[peer])
    assert made.choose(servers("both"), servers("one"), None) is None
    assert made.unfit(servers("both", "one"), (later,)) == {"one"}
    assert made.unfit(servers("one"), (later,)) == set(), (
        "it says itself whether that is to come or over"
    )
    assert mine.knows(later), "versions are looked at when a payload is read"
