"""The law of `ActivationCodec` (compression/activation.py) on every name of its catalogue, and how
peers agree on a codec."""

import contextlib
import dataclasses
import re
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from farflock.compression.activation import (
    ActivationContext,
    CodecOffer,
    Flat,
    Incompatible,
    Masked,
    agree,
)
from farflock.compression.activation_catalog import (
    ACTIVATIONS,
    activation_codec,
    alternatives,
    known_of,
    max_bytes,
)
from farflock.compression.aqsgd import ResyncNeeded
from farflock.compression.catalog import codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor
from farflock.compression.subspace import Basis

WIDTH, VOCABULARY = 48, 97
NAMES = [
    *ACTIVATIONS,
    "int4,int4",
    "topk:3/10,topk:5/10",
    "topk:3/10",
    "hadamard4:8,fp16",
    "aqsgd4,hadamard8",
]
NAMES = [name.replace("subspace:40", "subspace:8") for name in [*NAMES, "subspace:40+fp32,int8"]]
SHAPES = [(2, 5, WIDTH), (1, 1, WIDTH), (3, 7, WIDTH), (0, 4, WIDTH), (2, 0, WIDTH)]
KINDS = ("usual", "any", "huge", "denormal", "half", "rare", "zeros", "largest")
REFUSALS = (CorruptPayload, Incompatible, ResyncNeeded)

# the kernel has its bits (test_native.py); hostile bytes go to both
pytestmark = pytest.mark.usefixtures("oracle")
each_codec = pytest.mark.parametrize("name", NAMES)
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def basis(values):
    drawn = Basis.drawn(WIDTH, 8, seed=1)
    return drawn.with_tables(values("usual", VOCABULARY * WIDTH).view(-1, WIDTH) * 1000)


@pytest.fixture
def ends(basis):
    """A function from a name to the sender's and the receiver's codec."""
    return lambda name: tuple(activation_codec(name, edge="a>b", basis=basis) for _ in range(2))


def forward_of(shape, **more):
    batch, length, _ = shape
    tokens = (torch.arange(batch * length) * 31 % VOCABULARY).view(batch, length)
    usual = {
        "samples": tuple(range(100, 100 + batch)),
        "tokens": tokens,
        "edge": "a>b",
        "epoch": 3,
        "run_seed": 4,
    }
    return ActivationContext(shape, **{**usual, **more})


def backward_of(ctx, arrived):
    return dataclasses.replace(ctx, direction="backward", arrived=arrived)


@pytest.fixture
def activation(values, basis):
    """A function (name, ctx, kind, seed) -> an activation that a stage may send: any values, or for
    a subspace codec values in the subspace."""

    def make(name, ctx, kind="usual", seed=0):
        if not name.startswith("subspace"):
            return values(kind, ctx.count, seed).view(ctx.shape).to(ctx.dtype)
        batch, length, _ = ctx.shape
        inside = values("usual", batch * length * 8, seed).view(batch, length, 8) * 1000
        return (inside @ basis.columns_DK.T + basis.fixed_VD[ctx.tokens]).to(ctx.dtype)

    return make


def written(encode, x, ctx):
    out = bytearray(b"before")
    assert encode(x, ctx, out) == len(out) - 6 <= ctx_limit(encode, ctx)
    assert out[:6] == b"before"
    return bytes(out[6:])


def ctx_limit(encode, ctx):
    return encode.__self__.max_bytes(ctx)


def twin(name, x, ctx):
    """The result of the flat codec of the same name, which a codec without memory must equal."""
    c, out, payload = codec(name), torch.empty(x.numel()), bytearray()
    c.encode(x.reshape(-1), ctx.flat(), payload)
    c.decode(payload, ctx.flat(), out)
    return out.view(x.shape)


@each_codec
@pytest.mark.parametrize("shape", SHAPES)
def test_activation_and_gradient_come_back_finite_in_shape_and_dtype(ends, activation, name, shape):
    for kind in KINDS:
        ctx = forward_of(shape)
        sender, receiver = ends(name)
        x = activation(name, ctx, kind)
        back = receiver.decode(written(sender.encode, x, ctx), ctx)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert bool(back.isfinite().all())
        ctx = backward_of(ctx, back)
        grad = receiver.decode_grad(written(sender.encode_grad, x, ctx), ctx)
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert bool(grad.isfinite().all())


LOOSE = {
    "raw": 0,
    "fp32": 0,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "int8": 0.01,
    "int4": 0.12,
    "fp4": 0.2,
    "topk:410/4096": 0.99,
}
LOOSE |= {
    "hadamard8": 0.01,
    "hadamard4": 0.12,
    "aqsgd4": 2.0**-11,
    "aqsgd8": 2.0**-11,
    "subspace:8+bf16": 2.0**-8,
}


@pytest.mark.parametrize("name", LOOSE)
def test_usual_activations_come_back_closely(ends, activation, name):
    ctx = forward_of((3, 7, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx)
    back = receiver.decode(written(sender.encode, x, ctx), ctx)
    assert float((back - x).norm() / x.norm()) <= LOOSE[name]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8", "int4", "fp4", "topk:3/10"])
def test_a_memoryless_activation_is_what_its_flat_codec_makes_of_the_values(
    ends, values, bits, name
):
    ctx = forward_of((2, 5, WIDTH))
    sender, receiver = ends(f"{name},int8:64")
    x = values("usual", ctx.count).view(ctx.shape)
    assert torch.equal(
        bits(receiver.decode(written(sender.encode, x, ctx), ctx)), bits(twin(name, x, ctx))
    )
    ctx = backward_of(ctx, x)
    assert torch.equal(
        bits(receiver.decode_grad(written(sender.encode_grad, x, ctx), ctx)),
        bits(twin("int8:64", x, ctx)),
    )


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_of_a_stage_is_served_and_nothing_becomes_infinite_in_it(
    ends, activation, name, dtype
):
    ctx = forward_of((2, 5, WIDTH), dtype=dtype)
    sender, receiver = ends(name)
    kind = "half" if dtype == torch.bfloat16 else "usual"
    x = activation(name, ctx, kind)
    back = receiver.decode(written(sender.encode, x, ctx), ctx)
    assert back.dtype == dtype
    assert bool(back.isfinite().all())


def test_raw_is_exact_to_the_bit_in_every_dtype(ends):
    sender, receiver = ends("raw")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = (torch.arange(30, dtype=torch.float64) / 7).to(dtype).view(1, 5, 6)
        ctx = ActivationContext((1, 5, 6), dtype)
        assert torch.equal(receiver.decode(written(sender.encode, x, ctx), ctx), x)
        assert sender.max_bytes(ctx) == 30 * dtype.itemsize


def test_values_above_the_range_of_the_stages_dtype_are_cut_to_it(ends):
    sender, receiver = ends("fp32")
    x = torch.tensor([1e30, -1e30]).view(1, 1, 2)
    payload = written(sender.encode, x, ActivationContext((1, 1, 2)))
    back = receiver.decode(payload, ActivationContext((1, 1, 2), torch.float16))
    assert back.view(-1).tolist() == [65504.0, -65504.0]


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_sent(ends, activation, name, bad):
    ctx = forward_of((2, 5, WIDTH))
    for at in (0, 200, 479):
        x, out = activation(name, ctx), bytearray(b"before")
        arrived = x.clone()
        x.view(-1)[at] = bad
        sender, receiver = ends(name)
        with pytest.raises(UnencodableTensor, match="1 of 480"):
            sender.encode(x, ctx, out)
        with pytest.raises(UnencodableTensor, match="1 of 480"):
            receiver.encode_grad(x, backward_of(ctx, arrived), out)
        assert out == b"before"


@each_codec
def test_only_what_the_header_says_is_sent_and_only_in_its_direction(ends, activation, name):
    ctx = forward_of((2, 5, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx)
    for wrong in (x[:1], x.view(5, 2, WIDTH), x.double(), x.view(-1)):
        with pytest.raises(UnencodableTensor, match="the header says"):
            sender.encode(wrong, ctx, bytearray())
    back = backward_of(ctx, x)
    for call in (
        lambda: sender.encode(x, back, bytearray()),
        lambda: sender.encode_grad(x, ctx, bytearray()),
        lambda: receiver.decode(written(sender.encode, x, ctx), back),
        lambda: receiver.decode_grad(written(sender.encode_grad, x, back), ctx),
    ):
        with pytest.raises(ValueError, match="direction"):
            call()


@each_codec
def test_what_is_not_contiguous_is_sent_as_it_reads(ends, activation, name):
    ctx = forward_of((3, 7, WIDTH))
    x = activation(name, ctx)
    scattered = torch.empty(3, 7, 2 * WIDTH)[..., ::2].copy_(x)
    assert written(ends(name)[0].encode, scattered, ctx) == written(ends(name)[0].encode, x, ctx)


@pytest.mark.usefixtures("version")
@each_codec
@few
@given(data=st.data())
def test_any_bytes_at_all_are_finite_values_or_refused_and_leave_no_trace(
    ends, activation, name, data
):
    ctx = forward_of((2, 3, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx, data.draw(st.sampled_from(KINDS)))
    good = written(sender.encode, x, ctx)
    back = backward_of(ctx, activation(name, ctx))
    good_grad = written(sender.encode_grad, x, back)
    if data.draw(st.booleans()):  # what a pinned end remembers, so that differences are read too
        receiver.decode(good, ctx)
        good = written(sender.encode, x, ctx)
    for read, payload, at in (
        (receiver.decode, good, ctx),
        (receiver.decode_grad, good_grad, back),
    ):
        bad = bytearray(payload)
        for _ in range(data.draw(st.integers(1, 3))):
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
        for hostile in (
            bad,
            data.draw(st.binary(max_size=40)),
            data.draw(st.binary(min_size=len(bad), max_size=len(bad))),
        ):
            with contextlib.suppress(*REFUSALS):
                values = read(hostile, at)
                assert values.shape == ctx.shape
                assert bool(values.isfinite().all())
    with contextlib.suppress(ResyncNeeded):
        assert torch.isfinite(receiver.decode(good, ctx)).all()


@each_codec
def test_every_truncation_and_extension_is_refused(ends, activation, name):
    ctx = forward_of((2, 2, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx)
    back = backward_of(ctx, x)
    payload, grad = written(sender.encode, x, ctx), written(sender.encode_grad, x, back)
    for read, good, at in ((receiver.decode, payload, ctx), (receiver.decode_grad, grad, back)):
        for wrong in (
            *(good[:stop] for stop in range(0, len(good), 7)),
            *(good + bytes(n) for n in (1, 2, 8, 500)),
        ):
            with pytest.raises(CorruptPayload):
                read(wrong, at)


class Taken(TorchDispatchMode):
    """A count of the bytes of all tensors made inside, freed ones too: at least the peak."""

    def __init__(self):
        super().__init__()
        self.bytes, self.seen = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.untyped_storage().data_ptr() not in self.seen
        ):
            self.seen[result.untyped_storage().data_ptr()] = result
            self.bytes += result.untyped_storage().nbytes()
        return result


def memory_taken(action):
    """Return the bytes of tensors and the peak of Python's own memory while `action` runs, to its
    end or to a refusal."""
    with Taken():
        # torch's imports at its first watched call are not the codec's memory
        torch.empty(1)
    tracemalloc.start()
    with Taken() as taken, contextlib.suppress(*REFUSALS):
        action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken.bytes, peak


@each_codec
def test_a_payload_of_the_wrong_length_takes_no_memory(ends, activation, name):
    ctx = forward_of((64, 500, WIDTH))
    receiver = ends(name)[1]
    for payload in (b"", bytes(1000), b"\x02" * 5000, bytes(receiver.max_bytes(ctx) + 1)):
        tensors, python = memory_taken(lambda payload=payload: receiver.decode(payload, ctx))
        assert tensors == 0
        assert python < 20_000


@each_codec
def test_reading_takes_a_small_multiple_of_what_is_read(ends, activation, name):
    ctx = forward_of((4, 400, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx)
    payload = written(sender.encode, x, ctx)
    tensors, python = memory_taken(lambda: receiver.decode(payload, ctx))
    multiple = 32 if name.startswith("topk:3") else 10  # so dense that positions weigh most
    assert tensors <= multiple * x.nbytes
    assert python <= multiple * x.nbytes


@each_codec
def test_writing_and_reading_are_deterministic_and_leave_their_arguments_alone(
    ends, activation, name
):
    ctx = forward_of((2, 5, WIDTH))
    sender, receiver = ends(name)
    x = activation(name, ctx)
    before = x.clone()
    payload = written(sender.encode, x, ctx)
    assert torch.equal(x, before)
    assert written(ends(name)[0].encode, x, ctx) == payload
    back = receiver.decode(payload, ctx)
    assert torch.equal(ends(name)[1].decode(memoryview(b"\0" + payload)[1:], ctx), back)
    assert back.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@each_codec
def test_what_requires_a_gradient_is_sent_without_one(ends, activation, name):
    ctx = forward_of((2, 5, WIDTH))
    x = activation(name, ctx).requires_grad_()
    sender, receiver = ends(name)
    assert not receiver.decode(written(sender.encode, x, ctx), ctx).requires_grad


def test_the_gradient_under_the_mask_is_the_gradient_of_what_was_computed(values):
    c, ctx = Masked(codec("topk:3/10")), ActivationContext((2, 5, 20))
    x = values("usual", 200).view(2, 5, 20)
    arrived = c.decode(written(c.encode, x, ctx), ctx)
    ctx = backward_of(ctx, arrived)
    grad = values("usual", 200, seed=1).view(2, 5, 20)
    payload = written(c.encode_grad, grad, ctx)
    assert len(payload) == codec("int8").max_bytes(60)
    back = c.decode_grad(payload, ctx)
    assert bool(back.any())
    assert not back[arrived == 0].any()
    torch.testing.assert_close(
        back[arrived != 0], grad[arrived != 0], rtol=0, atol=float(grad.abs().amax()) / 253
    )


def test_a_missing_mask_is_asked_for():
    c, grad = Masked(codec("topk:3/10")), torch.ones(1, 1, 20)
    with pytest.raises(ValueError, match="give it to the gradient's context"):
        c.encode_grad(grad, ActivationContext((1, 1, 20), direction="backward"), bytearray())


def test_a_gradient_with_a_top_k_of_its_own_keeps_its_own_largest(values):
    c = activation_codec("topk:3/10,topk:5/10")
    ctx = ActivationContext((1, 1, 20), direction="backward")
    grad = torch.arange(20.0).view(1, 1, 20)
    back = c.decode_grad(written(c.encode_grad, grad, ctx), ctx).view(-1)
    assert back.nonzero().view(-1).tolist() == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("name", ["ecsq:100", "topk2:64/4096", "bf16+zstd", "lowrank:4"])
def test_codecs_whose_payloads_vary_in_length_are_refused_by_name(name):
    for build in (
        lambda: Flat(codec(name), codec("int8")),
        lambda: activation_codec(f"int8,{name}"),
    ):
        with pytest.raises(ValueError, match=re.escape(name) + ".*choose one of"):
            build()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("int4", "int4,int8"),
        ("int8", "int8,int8"),
        ("topk:410/4096", "topk:410/4096,mask"),
        ("topk:9/90", "topk:9/90,mask"),
        ("hadamard4", "hadamard4,hadamard8"),
        ("hadamard4:32,bf16", "hadamard4:32,bf16"),
        ("aqsgd4", "aqsgd4,int8"),
        ("subspace:8", "subspace:8+bf16,bf16"),
        ("subspace:8+int8,fp32", "subspace:8+int8,fp32"),
    ],
)
def test_a_name_says_both_ways_and_is_read_back(basis, spec, name):
    built = activation_codec(spec, basis=basis)
    assert built.name == name
    assert activation_codec(name, basis=basis).name == name


def test_gradients_are_never_coarser_by_default():
    bits = {"raw": 64, "fp32": 32, "fp16": 16, "bf16": 16, "mask": 8, "int8": 8, "hadamard8": 8}
    coarse = {"raw": 64, "fp32": 32, "fp16": 16, "bf16": 16, "subspace:40+bf16": 16}
    assert all(bits[gradient] >= coarse.get(name, 8) for name, gradient in ACTIVATIONS.items())


@pytest.mark.parametrize("spec", ["int9", "", "hadmard4", "x" * 9999, "subspaces:4", "none,int8"])
def test_an_unknown_name_is_refused_with_the_nearest(spec):
    with pytest.raises(ValueError, match="is not known; did you mean") as refusal:
        activation_codec(spec)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "spec",
    [
        "raw,int8",
        "int8,raw",
        "int8,mask,",
        "int8,",
        "hadamard4:48",
        "hadamard5",
        "subspace:0",
        "subspace:x",
        "aqsgd4,",
    ],
)
def test_what_cannot_be_built_is_a_value_error(basis, spec):
    with pytest.raises(ValueError, match=r"\w"):
        activation_codec(spec, basis=basis)


def test_a_subspace_without_its_basis_says_what_to_fetch(basis):
    for given_ in (None, basis):
        with pytest.raises(
            ValueError, match=r"needs the run's basis of rank 9.*fetch it by the digest"
        ):
            activation_codec("subspace:9", basis=given_)


@given(
    st.text(max_size=30)
    | st.from_regex(r"(int[48]|topk|hadamard[48]|aqsgd[48]|raw)[:0-9/,a-z]{0,12}", fullmatch=True)
)
def test_any_text_is_a_codec_or_a_value_error(spec):
    with contextlib.suppress(ValueError):
        built = activation_codec(spec)
        assert activation_codec(built.name).name == built.name


def test_scopes_say_what_routes_must_grant(ends):
    assert {
        name: ends(name)[0].scope for name in ("int8", "topk:3/10", "raw", "aqsgd4", "subspace:8")
    } == {
        "int8": "memoryless",
        "topk:3/10": "memoryless",
        "raw": "memoryless",
        "aqsgd4": "edge_sample",
        "subspace:8": "shared_params",
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shape": (2, 3)}, "three dimensions"),
        ({"shape": (-1, 3, 4)}, "not allowed"),
        ({"shape": (1 << 14, 1 << 14, 2)}, "smaller microbatches"),
        ({"dtype": torch.int8}, "cannot be sent"),
        ({"direction": "up"}, "choose forward or backward"),
        ({"samples": (1,)}, "each sequence"),
        ({"tokens": torch.zeros(2, 3)}, "must be integers"),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64)}, "must be integers of shape"),
        ({"arrived": torch.zeros(1)}, "its gradient is"),
    ],
)
def test_a_header_that_cannot_be_is_refused_in_words(wrong, words):
    with pytest.raises(ValueError, match=words):
        ActivationContext(**{"shape": (2, 3, 4), **wrong})


def test_a_flat_codec_is_told_run_epoch_edge_direction_and_width():
    ctx = ActivationContext((2, 3, 4), microbatch=9, edge="a>b", epoch=5, run_seed=7)
    assert ctx.flat() == Context(7, 5, "a>b forward", 9, 4)


INT8, BF16 = CodecOffer("int8,int8", 1), CodecOffer("bf16,bf16", 1)


def test_the_first_of_mine_that_is_theirs_too_is_taken():
    assert agree([INT8, BF16], [BF16, INT8]) == INT8
    assert agree([CodecOffer("new,new", 1), BF16], [INT8, BF16]) == BF16


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], "subspace:8 is not known there"),
        (
            [CodecOffer("subspace:8", 3, b"a")],
            r"at version 2 here and \[3\] there: update the older one",
        ),
        (
            [CodecOffer("subspace:8", 2, b"b")],
            "version 2 has digest 61 here and another there: fetch it again",
        ),
    ],
)
def test_without_a_common_offer_the_edge_is_refused_by_name_with_the_remedy(theirs, words):
    with pytest.raises(Incompatible, match=words + ".*such as bf16"):
        agree([CodecOffer("subspace:8", 2, b"a")], theirs)


def test_a_record_with_endless_offers_is_read_to_a_limit():
    with pytest.raises(Incompatible):
        agree([BF16], [CodecOffer(f"x{i}", 1) for i in range(64)] + [BF16])


@pytest.mark.parametrize(
    "wrong", [("x" * 65, 1, b""), ("int8", -1, b""), ("int8", 1 << 32, b""), ("int8", 1, bytes(33))]
)
def test_an_offer_that_is_too_long_is_refused(wrong):
    with pytest.raises(ValueError, match="an offer needs"):
        CodecOffer(*wrong)


@each_codec
def test_two_ends_of_a_name_agree(ends, name):
    sender, receiver = ends(name)
    offer = agree(sender.offers(0)[:1], receiver.offers(0))
    assert (offer.name, offer.version, offer.digest) == (sender.name, sender.version, sender.digest)


def test_alternatives_are_in_the_order_in_which_they_are_preferred():
    assert alternatives("int4 | int8|raw") == ("int4", "int8", "raw")
    assert alternatives("int4,int8") == ("int4,int8",)
    assert alternatives("aqsgd4") == ("aqsgd4",)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("int8 | subspace:4", "subspace:4.*keep something"),
        ("aqsgd4,int8 | int8", "aqsgd4.*keep something"),
        ("int8 | int8", "names a codec twice"),
        (" | ".join(f"topk:{k}/4096" for k in range(1, 11)), "more than 8"),
    ],
)
def test_what_cannot_be_one_of_several_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        known_of(spec)


def test_of_several_those_are_left_out_that_another_release_has():
    assert known_of("vq:9 | int8 | raw") == ("int8", "raw")
    assert known_of("subspace:4") == ("subspace:4",)
    with pytest.raises(ValueError, match=r"vq:9.*not known"):
        known_of("vq:9 | wq")


def test_the_most_bytes_of_several_are_those_of_the_largest():
    ctx = ActivationContext((2, 3, 8), torch.float32)
    assert max_bytes("int8 | raw", ctx) == max_bytes("raw", ctx) > max_bytes("int8", ctx)
