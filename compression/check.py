"""The laws of `Codec` (compression/codec.py) as functions for tests and for authors of codecs.

Each function tries one codec on chosen values or bytes and raises `CodecLawBroken` with the law and
a counterexample. The examples are the same in every process: `example` derives them from integers,
without a random generator.
"""

import contextlib
import random
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farflock.compression.codec import Buffer, Codec, Context, CorruptPayload, UnencodableTensor

LAWS = {
    0: "a codec is a frozen value, and equal codecs stand for each other",
    1: "decode(encode(x)) fills `out` with finite values, within the codec's stated bound of x",
    2: "`encode` appends exactly the number of bytes that it returns, at most `max_bytes(len(x))`",
    3: "a tensor that is not flat, finite float32 is `UnencodableTensor`; "
    "empty and all-zero tensors round-trip",
    4: "`decode` of any bytes fills `out` with finite values or raises `CorruptPayload`, "
    "in little memory",
    5: "`encode` and `decode` are pure and deterministic",
    6: "shards that are cut at multiples of `granule` decode as the whole tensor does",
}
CONTEXT = Context(run_seed=3, round=2, tensor="layers.0.weight", shard=1)
SHAPE = (4096,)  # of the tensor for which `granule` is asked
LENGTHS = (0, 1, 3, 11, 70, 260)  # of tensors whose payloads are cut and extended at every byte
LARGE = 3 * 65536 + 5  # values, for counting memory
FREE_BYTES = 10_000  # of Python's own memory that a refusal may take
HOSTILE_TRIES = 30  # payloads with wrong bytes, of each length
BEFORE = b"before"  # content of `out` before a codec appends to it
UNTOUCHED = 7.5  # content of a tensor before a codec decodes into it

Bound = Callable[[Tensor], Tensor]
Bits = NDArray[np.uint32]


class CodecLawBroken(AssertionError):
    """Raised when a codec breaks a law, with the law's number, its text, and what was seen."""

    def __init__(self, law: int, counterexample: str) -> None:
        super().__init__(f"codec law {law} is broken: {LAWS[law]}. {counterexample}")
        self.law, self.counterexample = law, counterexample


@runtime_checkable
class BoundedCodec(Protocol):
    """A codec whose class states its bound in code."""

    def bound(self, x: Tensor) -> Tensor:
        """Return the largest error of each value of the flat x, float64 and never negative."""
        ...


def _require(kept: bool, law: int, counterexample: str) -> None:
    if not kept:
        raise CodecLawBroken(law, counterexample)


# Examples


def _mixed_bits(count: int, seed: int) -> Bits:
    """Return 32 well-mixed bits per value, from integers (MurmurHash3's finaliser on a counter)."""
    with np.errstate(over="ignore"):
        h = np.arange(count, dtype=np.uint32) + np.uint32(seed % 2**32 * 0x9E3779B1 % 2**32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def _exponents(low: int, high: int) -> Callable[[Bits], NDArray[np.float32]]:
    """Return a function that turns bits into values with biased exponents in [low, high)."""

    def make(bits: Bits) -> NDArray[np.float32]:
        exponent = np.uint32(low) + (bits >> np.uint32(8)) % np.uint32(high - low)
        sign, fraction = bits & np.uint32(0x80000000), bits * np.uint32(77) >> np.uint32(9)
        chosen: Bits = sign | (exponent << np.uint32(23)) | fraction
        return chosen.view(np.float32)

    return make


KINDS: Mapping[str, Callable[[Bits], NDArray[Any]]] = {
    "usual": lambda bits: bits.view(np.int32) * np.float32(2.0**-41),  # uniform in about ±1e-3
    "any": _exponents(0, 255),
    "huge": _exponents(250, 255),
    "denormal": _exponents(0, 1),
    "tiny": _exponents(0, 30),
    "half": _exponents(95, 145),  # around fp16's range, both ends
    "ties": lambda bits: (bits % np.uint32(5)).astype("f4") - np.float32(2),
    "rare": lambda bits: np.where(bits % np.uint32(37) == 0, np.float32(-3.5), np.float32(0)),
    "zeros": lambda bits: np.zeros(len(bits), "f4"),
    "minus_zeros": lambda bits: np.full(len(bits), -0.0, "f4"),
    "largest": lambda bits: np.where(bits & 1, np.float32(3.4028235e38), np.float32(-3.4028235e38)),
}


def example(kind: str, count: int, seed: int = 0) -> Tensor:
    """Return a flat finite float32 tensor of one of `KINDS`; the same bits on every machine."""
    return torch.from_numpy(
        np.ascontiguousarray(KINDS[kind](_mixed_bits(count, seed)), dtype=np.float32)
    )


def sizes(codec: Codec) -> list[int]:
    """Return 0, 1, and sizes around one granule and around several."""
    g = codec.granule(SHAPE)
    return sorted({0, 1, 2, 3, g - 1, g, g + 1, 2 * g, 3 * g - 1} - {-1})


def encoded(codec: Codec, x: Tensor) -> bytes:
    """Return the payload of x."""
    out = bytearray()
    codec.encode(x, CONTEXT, out)
    return bytes(out)


def decoded(codec: Codec, payload: Buffer, count: int) -> Tensor:
    """Return the values of a payload; NaN where `decode` wrote none."""
    out = torch.full((count,), float("nan"), dtype=torch.float32)
    codec.decode(payload, CONTEXT, out)
    return out


def _refusal(
    law: int, action: Callable[[], object], allowed: type[Exception] | tuple[()], seen: str
) -> Exception | None:
    """Return the allowed error that `action` raises, or None. Any other error breaks the law;
    `seen` describes it, with `{}` for its name."""
    try:
        action()
    except allowed as error:
        return error
    except Exception as error:
        raise CodecLawBroken(law, seen.format(repr(error))) from error
    return None


def _round_trip(codec: Codec, x: Tensor, law: int) -> Tensor:
    """Return decode(encode(x)); any error breaks the law."""
    back: list[Tensor] = []
    case = f"{len(x)} finite values do not round-trip: {{}}."
    _refusal(law, lambda: back.append(decoded(codec, encoded(codec, x), len(x))), (), case)
    return back[0]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether the bits are equal: 0 is not -0."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


# Law 0: frozen values


def check_frozen(make: Callable[[], Codec]) -> None:
    """Check that two codecs made alike are equal, and that neither can be changed."""
    codec, other = make(), make()
    _require(
        codec == other and hash(codec) == hash(other),
        0,
        "Two codecs that were made alike are not equal.",
    )
    advice = "write @dataclass(frozen=True, slots=True) before the class"
    _require(
        not hasattr(codec, "__dict__"), 0, f"It has a __dict__, which can hold anything: {advice}."
    )
    # Python 3.11 trips over its own message for slotted classes
    with contextlib.suppress(AttributeError, TypeError):
        setattr(codec, "name", "other")  # noqa: B010 - the protocol says that it cannot be set
        raise CodecLawBroken(0, f"Its name could be set: {advice}.")


# Law 1: round trips within the bound


def check_bound(codec: Codec, x: Tensor, bound: Bound | None = None) -> None:
    """Check that values come back finite and, if a bound is given, within it."""
    back = _round_trip(codec, x, 1)
    wrong = int((~torch.isfinite(back)).sum())
    _require(not wrong, 1, f"{wrong} of {len(x)} decoded values are NaN, infinite or not written.")
    if bound is None or not len(x):
        return
    excess = (back.double() - x.double()).abs() - bound(x)
    at = int(excess.argmax())
    seen = (
        f"{float(x[at])!r} came back as {float(back[at])!r}, "
        f"which is {float(excess[at]):.3g} more than the bound allows."
    )
    _require(float(excess[at]) <= 0, 1, seen)


def check_every_kind(codec: Codec, bound: Bound | None = None) -> None:
    """Check the bound for all kinds of values in all of the codec's sizes."""
    for _, _, x in _examples(codec):
        check_bound(codec, x, bound)


def _examples(codec: Codec) -> Iterator[tuple[str, int, Tensor]]:
    for kind in KINDS:
        for count in sizes(codec):
            yield kind, count, example(kind, count)


# Law 2: lengths


def check_length(codec: Codec) -> None:
    """Check that `encode` only appends, returns the number of bytes, and respects `max_bytes`."""
    for kind, count, x in _examples(codec):
        out = bytearray(BEFORE)
        said, case = codec.encode(x, CONTEXT, out), f"{count} values ({kind})"
        written = len(out) - len(BEFORE)
        _require(out.startswith(BEFORE), 2, f"{case}: what stood before the payload was changed.")
        _require(said == written, 2, f"{case}: `encode` returned {said} and wrote {written} bytes.")
        limit = codec.max_bytes(count)
        _require(
            written <= limit,
            2,
            f"{case}: {written} bytes were written, and `max_bytes` allows {limit}.",
        )


# Law 3: tensors that cannot be encoded


def check_only_finite(codec: Codec, bad: float) -> None:
    """Check that a value that is not finite is refused at any position, and nothing is written."""
    for count in (1, 2, codec.granule(SHAPE) + 1):
        for at in sorted({0, count // 2, count - 1}):
            x = example("usual", count)
            x[at] = bad
            _require_unencodable(
                codec, x, f"1 of {count} values", f"{bad} at place {at} of {count}"
            )


def check_only_flat(codec: Codec, x: Tensor) -> None:
    """Check that a tensor of another type or shape is refused."""
    _require_unencodable(
        codec, x, "flat float32", f"a tensor of {x.dtype} and shape {tuple(x.shape)}"
    )


def _require_unencodable(codec: Codec, x: Tensor, words: str, case: str) -> None:
    out = bytearray(BEFORE)
    advice = "require_finite (compression/codec.py) refuses it"
    error = _refusal(
        3,
        lambda: codec.encode(x, CONTEXT, out),
        UnencodableTensor,
        f"{case} raised {{}}; {advice}.",
    )
    _require(error is not None, 3, f"{case} was encoded; {advice}.")
    _require(
        words in str(error),
        3,
        f"{case} was refused, but the message does not say {words!r}: {error}",
    )
    _require(out == BEFORE, 3, f"{case} was refused, but something was written.")


def check_zeros(codec: Codec) -> None:
    """Check that empty and all-zero tensors come back exactly."""
    for count in sizes(codec):
        back = _round_trip(codec, torch.zeros(count, dtype=torch.float32), 3)
        _require(
            torch.equal(back, torch.zeros(count, dtype=torch.float32)),
            3,
            f"{count} zeros came back as {back[:4].tolist()}.",
        )


# Law 4: hostile payloads


def check_bytes(codec: Codec, payload: Buffer, count: int) -> None:
    """Check that these bytes give `count` finite values, or are refused and leave `out` alone."""
    out = torch.full((count,), UNTOUCHED, dtype=torch.float32)
    case = f"{count} values from the {len(payload)} bytes {bytes(payload[:20]).hex()}"
    if _is_refused(codec, payload, out, case):
        _require(
            bool((out == UNTOUCHED).all()), 4, f"{case} were refused, but left a trace in `out`."
        )
    _require(
        bool(torch.isfinite(out).all()), 4, f"{case} hold NaN or infinity: refuse such a payload."
    )


def _is_refused(codec: Codec, payload: Buffer, out: Tensor, case: str) -> bool:
    seen = f"{case} raised {{}}, and only `CorruptPayload` is caught."
    return (
        _refusal(4, lambda: codec.decode(payload, CONTEXT, out), CorruptPayload, seen) is not None
    )


def check_hostile_bytes(codec: Codec) -> None:
    """Check payloads in which some bytes are replaced, also by those that make NaN and infinity."""
    chance = random.Random(0)
    for count in LENGTHS:
        for kind in ("usual", "any"):
            payload = encoded(codec, example(kind, count))
            check_bytes(codec, b"\xff" * len(payload), count)
            for _ in range(HOSTILE_TRIES if payload else 0):
                wrong = bytearray(payload)
                for _ in range(chance.randint(1, 3)):
                    wrong[chance.randrange(len(wrong))] = chance.choice(
                        (0x00, 0x7F, 0x80, 0xFF, chance.randrange(256))
                    )
                check_bytes(codec, wrong, count)


def check_cut_and_extended(codec: Codec) -> None:
    """Check that a payload with missing or extra bytes is refused."""
    for count in LENGTHS:
        payload = encoded(codec, example("usual", count))
        cut = (payload[:stop] for stop in range(len(payload)))
        for wrong in (*cut, *(payload + bytes(n) for n in (1, 2, 4, 64))):
            case = f"{len(wrong)} bytes for {count} values, whose payload has {len(payload)},"
            refused = _is_refused(codec, wrong, torch.empty(count, dtype=torch.float32), case)
            _require(
                refused,
                4,
                f"{case} were accepted; require_length (compression/codec.py) refuses them.",
            )


def check_memory(codec: Codec, multiple: int = 4) -> None:
    """Check that `decode` allocates at most `multiple` times `out` in tensors, half in Python."""
    payload, out = encoded(codec, example("usual", LARGE)), torch.empty(LARGE, dtype=torch.float32)
    tensors, python = _memory_taken(lambda: codec.decode(payload, CONTEXT, out))
    for taken, limit, what in (
        (tensors, multiple, "in tensors"),
        (python, multiple // 2, "in Python"),
    ):
        seen = (
            f"{taken} bytes were taken {what} for {4 * LARGE} bytes of values; "
            f"{limit} times as much is allowed."
        )
        _require(taken <= limit * 4 * LARGE, 4, seen)


def check_refused_before_memory(codec: Codec) -> None:
    """Check that a payload of the wrong length is refused before anything is allocated."""
    out = torch.empty(1_000_000, dtype=torch.float32)
    for payload in (b"", b"\x00" * 1000, bytes(codec.max_bytes(len(out)) + 1)):
        tensors, python = _memory_taken(lambda payload=payload: codec.decode(payload, CONTEXT, out))  # type: ignore[misc]
        case = f"{len(payload)} bytes for {len(out)} values"
        seen = (
            f"{case}: {tensors} bytes of tensors and {python} of Python were taken "
            "before they were refused."
        )
        _require(tensors == 0 and python < FREE_BYTES, 4, seen)


class _TakenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has not typed it
    """A count of the bytes of all tensors made inside, freed ones too: at least the peak."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, and to skip it torch would first spend seconds
        importing its compiler."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor this
        self.bytes = 0
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),  # noqa: ANN401 - torch's own signature
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - torch's own signature
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                self.seen[x.untyped_storage().data_ptr()] = x  # keeps addresses unique
                self.bytes += x.untyped_storage().nbytes()
        return result


def _memory_taken(action: Callable[[], None]) -> tuple[int, int]:
    """Run `action`, which may refuse its input. Return the bytes of its tensors and the peak of
    Python's own memory."""
    with _TakenTensors():
        torch.empty(
            1, dtype=torch.float32
        )  # torch's imports at its first watched call are not the codec's memory
    tracemalloc.start()
    try:
        with _TakenTensors() as taken, contextlib.suppress(CorruptPayload):
            action()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return taken.bytes, peak


# Law 5: purity


def check_pure(make: Callable[[], Codec]) -> None:
    """Check that inputs do not change, and that equal codecs, and all kinds of buffers, give equal
    results."""
    codec = make()
    count = 2 * codec.granule(SHAPE) + 3
    x = example("usual", count)
    before = x.clone()
    payload = encoded(codec, x)
    _require(torch.equal(x, before), 5, "`encode` has changed its tensor.")
    _require(
        encoded(make(), x.clone()) == payload,
        5,
        "Another object of the same codec writes other bytes.",
    )
    expected = decoded(codec, payload, count)
    unaligned = memoryview(b"\x00" + payload)[1:]
    for same in (payload, bytearray(payload), memoryview(payload), unaligned):
        back = decoded(codec, same, count)
        _require(
            _same_bits(back, expected),
            5,
            f"The same bytes in a {type(same).__name__} decode to other values.",
        )
    _require(bytes(unaligned) == payload, 5, "`decode` has changed its payload.")


# Law 6: shards


def check_cut_at_granules(codec: Codec) -> None:
    """Check that three shards, the last one short, decode as the whole tensor does. They are cut at
    the granule and, if that is small, also at a larger multiple of it."""
    granule = codec.granule(SHAPE)
    for cut in sorted({granule, granule * max(1, 64 // granule)}):
        x = example("usual", 3 * cut + cut // 2)
        whole = _round_trip(codec, x, 6)
        pieces = [
            _round_trip(codec, piece, 6) for piece in (x[:cut], x[cut : 3 * cut], x[3 * cut :])
        ]
        seen = (
            f"{len(x)} values cut at {cut} and {3 * cut} decode to other values; "
            f"the granule is {granule}."
        )
        _require(_same_bits(torch.cat(pieces), whole), 6, seen)


def check_codec(
    make: Callable[[], Codec],
    *,
    bound: Bound | None = None,
    memory: int = 4,
    of_whole: bool = False,
) -> None:
    """Raise `CodecLawBroken` unless the codecs that `make` (a function or a class) returns keep
    every law.

    `bound` maps a flat tensor to the largest error of each value, in float64. Without it the
    codec's method `bound` is used; without that, law 1 only requires finite values. Decoding may
    allocate `memory` times the size of `out`. `of_whole` is for a codec whose step depends on all
    the values that it is given, so that law 6 cannot hold.
    """
    codec = make()
    if bound is None and isinstance(codec, BoundedCodec):
        bound = codec.bound
    check_frozen(make)
    check_every_kind(codec, bound)
    check_length(codec)
    for bad in (float("nan"), float("inf"), -float("inf")):
        check_only_finite(codec, bad)
    for x in (
        torch.zeros(2, 2, dtype=torch.float32),
        torch.zeros(4, dtype=torch.float32).double(),
        torch.zeros(4, dtype=torch.float32).int(),
        torch.tensor(1.0, dtype=torch.float32),
    ):
        check_only_flat(codec, x)
    check_zeros(codec)
    check_hostile_bytes(codec)
    check_cut_and_extended(codec)
    check_memory(codec, memory)
    check_refused_before_memory(codec)
    check_pure(make)
    if not of_whole:
        check_cut_at_granules(codec)
