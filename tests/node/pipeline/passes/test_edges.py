"""Payloads on the edges between stages: both ends read the same values, whatever the codec."""

import dataclasses

import msgspec
import pytest
import torch

from farflock.compression.activation import Incompatible
from farflock.compression.activation_catalog import activation_codec
from farflock.compression.codec import CorruptPayload
from farflock.compression.subspace import Basis
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Backward, Forward
from farflock.swarm.messages import CodecId

BATCH, SEQ, DIM, VOCABULARY = 2, 5, 16, 300
CHANCE = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=CHANCE)
X, GRADIENT = (torch.randn(BATCH, SEQ, DIM, generator=CHANCE) for _ in range(2))
BASIS = Basis.drawn(DIM, 4, 2).with_tables(torch.randn(VOCABULARY, DIM, generator=CHANCE))
INSIDE = torch.randn(BATCH, SEQ, 4, generator=CHANCE) @ BASIS.columns_DK.T

# Stage 2 of a pipeline, whose output stage 4 takes.
SENT, TAKEN = Forward(7, 2, 1, 3), Forward(7, 4, 2, 3)
HERE, THERE = Backward(7, 2, 1, 3, 1), Backward(7, 4, 2, 3, 9)


def edges(codec="raw", dtype=torch.float32, basis=None):
    return Edges(activation_codec(codec, basis=basis), BATCH, SEQ, DIM, VOCABULARY, 11, dtype)


def over(made, x=X):
    """An activation from stage 2 to stage 4, and the gradient back."""
    payload = made.output(x, SENT, TOKENS)
    assert len(payload) <= made.max_bytes("forward")
    arrived = made.input(payload, TAKEN, TOKENS)
    assert torch.equal(arrived, made.input(payload, THERE, TOKENS)), (
        "forward and backward pass see the same input"
    )
    assert torch.equal(arrived, made.arrived(payload, HERE, TOKENS)), (
        "and so does the stage that made it"
    )
    back = made.input_gradient(GRADIENT.to(x.dtype), THERE, TOKENS, arrived)
    assert len(back) <= made.max_bytes("backward")
    return arrived, made.output_gradient(back, HERE, TOKENS, arrived if made.is_masked() else None)


def test_token_ids_are_integers_of_as_many_bytes_as_the_vocabulary_needs():
    made = edges()
    payload = made.pack(TOKENS)
    assert len(payload) == made.token_bytes == 2 * BATCH * SEQ
    assert torch.equal(made.unpack(payload), TOKENS)
    assert made.tokens == BATCH * SEQ


@pytest.mark.parametrize("payload", [b"", bytes(19), bytes(21), b"\xff" * 20])
def test_what_are_no_token_ids_is_refused(payload):
    with pytest.raises(CorruptPayload):
        edges().unpack(payload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_raw_is_what_it_was_bit_for_bit(dtype):
    arrived, gradient = over(edges("raw", dtype), X.to(dtype))
    assert torch.equal(arrived, X.to(dtype))
    assert torch.equal(gradient, GRADIENT.to(dtype))


@pytest.mark.parametrize(
    ("codec", "within"), [("int8", 0.02), ("hadamard8", 0.02), ("int4,int8", 0.4), ("bf16", 0.01)]
)
def test_others_are_what_it_was_within_their_bounds(codec, within):
    arrived, gradient = over(edges(codec))
    torch.testing.assert_close(arrived, X, rtol=0, atol=within * float(X.abs().max()))
    torch.testing.assert_close(gradient, GRADIENT, rtol=0, atol=0.02 * float(GRADIENT.abs().max()))
    assert not torch.equal(arrived, X)


def test_under_a_mask_the_gradient_is_that_of_what_arrived():
    made = edges("topk:1/4")
    assert made.is_masked()
    assert not edges("int8").is_masked()
    arrived, gradient = over(made)
    kept = arrived != 0
    assert 0.2 < float(kept.float().mean()) < 0.3
    torch.testing.assert_close(
        gradient[kept], GRADIENT[kept], rtol=0, atol=0.02 * float(GRADIENT.abs().max())
    )
    assert not gradient[~kept].any()


def test_in_a_subspace_tokens_and_a_few_numbers_say_all():
    made = edges("subspace:4+fp32,fp32", basis=BASIS)
    x = INSIDE + BASIS.fixed_VD[TOKENS]
    arrived, gradient = over(made, x)
    torch.testing.assert_close(arrived, x, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        gradient, GRADIENT @ BASIS.columns_DK @ BASIS.columns_DK.T, rtol=0, atol=1e-5
    )
    assert made.max_bytes("forward") < edges("fp32").max_bytes("forward") / 3


class Witness:
    """A codec that remembers in which contexts it was asked."""

    name, contexts = "raw,raw", []

    def _seen(self, ctx):
        self.contexts.append(
            (ctx.direction, ctx.edge, ctx.microbatch, ctx.epoch, ctx.run_seed, ctx.shape, ctx.dtype)
        )
        assert torch.equal(ctx.tokens, TOKENS)

    def encode(self, x, ctx, out):
        self._seen(ctx)

    encode_grad = encode

    def decode(self, payload, ctx):
        self._seen(ctx)
        return X

    decode_grad = decode


def test_both_ends_of_an_edge_name_one_passage_alike_and_another_one_otherwise():
    witness = Witness()
    made = Edges(witness, BATCH, SEQ, DIM, VOCABULARY, 11)
    made.output(X, SENT, TOKENS)
    made.input(b"", TAKEN, TOKENS)
    made.input_gradient(GRADIENT, THERE, TOKENS, X)
    made.output_gradient(b"", HERE, TOKENS)
    out, into, back, home = witness.contexts
    assert out == into
    assert back == home
    assert out[1:] == back[1:]
    assert (out[0], back[0]) == ("forward", "backward")
    made.output(X, Forward(7, 4, 2, 3), TOKENS)
    made.output(X, Forward(8, 2, 1, 3), TOKENS)
    made.output(X, Forward(7, 2, 1, 4), TOKENS)
    assert len(set(witness.contexts)) == 2 + 3


def test_before_the_first_round_the_epoch_is_the_first_one():
    witness = Witness()
    made = Edges(witness, BATCH, SEQ, DIM, VOCABULARY, 11)
    made.output(X, Forward(7, 2, 1, -1), TOKENS)
    assert witness.contexts[-1][3] == 0


@pytest.mark.parametrize("codec", ["raw", "int8", "topk:1/4"])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(10**5)])
def test_what_is_no_activation_and_no_gradient_is_refused(codec, payload):
    made = edges(codec)
    with pytest.raises(CorruptPayload):
        made.input(payload, TAKEN, TOKENS)
    with pytest.raises(CorruptPayload):
        made.output_gradient(payload, HERE, TOKENS, X)


def test_a_stage_answers_in_the_version_that_its_input_came_in_both_ways():
    made = edges("subspace:4+raw,raw", basis=BASIS)
    codec = SubspaceVersions(made.codec)
    made = dataclasses.replace(made, codec=codec)
    later = Basis(2, BASIS.columns_DK, BASIS.fixed_VD + 1.0, BASIS.fixed_LD)
    codec.hold(later)
    outputs = {
        version: basis.fixed_VD[TOKENS] + INSIDE for version, basis in ((1, BASIS), (2, later))
    }
    first = made.output(outputs[1], SENT, TOKENS)
    assert codec.version_of(first) == 1, "its own weights' version"
    codec.speak(2)
    assert codec.version_of(made.output(outputs[2], SENT, TOKENS)) == 2
    again = made.output(made.input(first, TAKEN, TOKENS), TAKEN, TOKENS, first)
    assert codec.version_of(again) == 1
    assert torch.allclose(made.input(again, TAKEN, TOKENS), outputs[1], atol=1e-5)
    back = made.input_gradient(GRADIENT, THERE, TOKENS, outputs[1], first)
    assert codec.version_of(back) == 1


def test_codecs_of_one_version_do_not_look_at_what_came():
    made = edges("int8")
    assert made.output(X, SENT, TOKENS, b"") == made.output(X, SENT, TOKENS)


def several(*names):
    codec, *others = map(activation_codec, names)
    return Edges(codec, BATCH, SEQ, DIM, VOCABULARY, 11, others=tuple(others))


def test_of_several_codecs_a_request_says_which_one_its_payloads_are_in():
    made = several("int4", "raw", "topk:1/4")
    assert [codec.name for codec in made.reads] == ["int4,int8", "raw,raw", "topk:1/4,mask"]
    plain, sparse = made.reads[1:]
    sent, here = (replaced(request, came=sparse, sends=plain) for request in (SENT, HERE))
    taken, there = (replaced(request, came=plain) for request in (TAKEN, THERE))
    payload = made.output(X, sent, TOKENS)
    assert payload == X.numpy().tobytes()
    assert len(payload) == made.max_bytes("forward", plain) > made.max_bytes("forward")
    assert torch.equal(made.input(payload, taken, TOKENS), X)
    back = made.input_gradient(GRADIENT, there, TOKENS, X)
    assert torch.equal(made.output_gradient(back, here, TOKENS), GRADIENT)
    assert made.is_masked(sparse)
    assert not made.is_masked(plain)
    assert made.written_in(payload, plain) == plain


def test_losses_are_read_as_they_were_written_in_float32():
    made = edges()
    for losses in ([2.5, 0.0], [float("inf"), float("nan")], [1e-30, 3e38]):
        payload = made.pack_losses(torch.tensor(losses, dtype=torch.float64))
        assert len(payload) == made.loss_bytes == 4 * BATCH
        read = made.unpack_losses(payload)
        assert read.dtype == torch.float64
        assert torch.equal(read.float(), torch.tensor(losses).float()) or read.isnan().any()
    assert made.unpack_losses(b"\x00\x00\x20\x40" * 2).tolist() == [2.5, 2.5]
    for payload in (b"", bytes(7), bytes(12)):
        with pytest.raises(CorruptPayload, match="are not the losses of 2 sequences"):
            made.unpack_losses(payload)


def replaced(request, **changes):
    return msgspec.structs.replace(request, **changes)


def test_a_codec_that_is_not_read_here_is_refused_by_name():
    made, stranger = several("int4", "raw"), CodecId("vq:9,int8", 1)
    assert not made.knows(stranger)
    assert not made.knows(CodecId("raw,raw", 2))
    assert made.knows(CodecId("raw,raw", 1))
    assert made.knows(None)
    with pytest.raises(Incompatible, match=r"vq:9.*not read here.*int4"):
        made.input(b"", msgspec.structs.replace(TAKEN, came=stranger), TOKENS)


def test_in_a_subspace_a_payload_says_itself_which_version_it_is_in():
    made = edges("subspace:4+fp32,fp32", basis=BASIS)
    assert made.follows_weights
    payload = made.output(INSIDE + BASIS.fixed_VD[TOKENS], SENT, TOKENS)
    assert (
        made.written_in(payload, None)
        == CodecId(made.codec.name, BASIS.version, BASIS.digest[:8])
        == made.reads[0]
    )
    assert made.written_in(payload[:11], None) is None
