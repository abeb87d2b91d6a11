"""Calls at a node with several stages go to the stage's server; one of them refuses the rest."""

from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.activation_catalog import activation_codec
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Forward,
    Refused,
    Revoke,
    decode_answer,
    encode,
)
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.dispatch import Closed, Dispatch
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.server import StageServer
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.run.split import even
from farflock.node.run.terms import ServerTerms
from farflock.swarm.peer.call_server import CallReply
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=3, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)


class Server:
    """Says which one it is."""

    def __init__(self, stage):
        self.stage = stage

    def admit(self, caller, request, sizes):
        return f"{self.stage} {caller} {sizes}".encode()

    async def serve(self, caller, request, payloads):
        return CallReply(f"{self.stage} {caller}".encode(), payloads)


DISPATCH = Dispatch({stage: Server(stage) for stage in (1, 2, 5)})


def test_each_kind_of_call_goes_to_the_server_of_its_stage():
    for stage in (1, 2, 5):
        requests = (
            Forward(3, stage, 0, 7),
            Backward(3, stage, 0, 7, 1),
            Confirm(3, stage, 1),
            Revoke(3, stage, 1),
        )
        for request in map(encode, requests):
            assert DISPATCH.admit("caller", request, (9,)) == f"{stage} caller (9,)".encode()
            reply = run_virtual(DISPATCH.serve("caller", request, (b"x",)))
            assert reply == CallReply(f"{stage} caller".encode(), (b"x",))


def test_a_stage_that_is_not_here_goes_to_the_first_one():
    assert DISPATCH.admit("caller", encode(Forward(3, 4, 0, 7)), ()) == b"1 caller ()"


@given(st.binary(max_size=64))
def test_whatever_is_sent_is_answered(request):
    assert DISPATCH.admit("caller", request, ()) is not None


def test_a_real_server_says_why_it_refuses_what_is_for_no_stage_here():
    stage = Stage(build(MODEL, 3, even(MODEL, 3)[1]))
    edges = Edges(activation_codec("raw"), 1, MODEL.context, MODEL.dim, MODEL.vocab_size, 9)
    given = EdgeEnds(edges), ServerTerms(), None
    server = StageServer(1, stage, *given, life=7, applied=lambda: 0, versions=WeightVersions())
    dispatch = Dispatch({1: server})
    for request, why in (
        (b"\xff", ""),
        (encode(Forward(3, 4, 0, 7)), "this peer serves stage 1, not 4"),
    ):
        answer = decode_answer(dispatch.admit("caller", request, ()))
        assert isinstance(answer, Refused)
        assert why in answer.why


@given(st.binary(max_size=200))
def test_a_node_that_serves_no_passes_says_why_to_whatever_comes(request):
    closed = Closed("it is free")
    assert decode_answer(closed.admit("caller", request, ())) == Refused("it is free")
    assert run_virtual(closed.serve("caller", request, ())) == CallReply(
        encode(Refused("it is free"))
    )
