"""The registry of activation codecs by name, a literal dict, and the parser of `FORWARD,GRADIENT`.

Gradients tolerate less loss than activations, so each name has its own gradient codec. If it is
omitted, the usual one below is used: `int4` means `int4,int8`.
"""

import difflib
import re
from dataclasses import dataclass

from farflock.compression import catalog
from farflock.compression.activation import (
    ActivationCodec,
    ActivationContext,
    Exact,
    Flat,
    Masked,
    require_exact_length,
)
from farflock.compression.aqsgd import AqSgd
from farflock.compression.codec import Codec
from farflock.compression.hadamard import Hadamard
from farflock.compression.subspace import Basis, Subspace, payload_bytes

ACTIVATIONS: dict[str, str] = {  # a usual name of each kind: its usual gradient
    "raw": "raw",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int8",
    "fp4": "int8",
    "topk:410/4096": "mask",
    "hadamard8": "hadamard8",
    "hadamard4": "hadamard8",
    "aqsgd4": "int8",
    "aqsgd8": "int8",
    "subspace:40+bf16": "bf16",
}

_USUAL = {re.split("[:+]", name)[0]: gradient for name, gradient in ACTIVATIONS.items()}
MAX_ALTERNATIVES = 8
_SHOWN = 64  # characters shown of a wrong name: it may come from a stranger's record


def activation_codec(spec: str, *, edge: str = "", basis: Basis | None = None) -> ActivationCodec:
    """Return the activation codec for a name: a key of `ACTIVATIONS`, perhaps with other numbers
    (`int8:128`, `subspace:16`) or followed by a gradient codec (`int4,int8`).

    `edge` pins a codec of edge scope; each call returns a new end without state. A subspace codec
    needs `basis`. Raise `ValueError` for anything else, with the nearest choice or what is missing.
    """
    forward, comma, gradient = spec[: 2 * _SHOWN].partition(",")
    kind = re.split("[:+]", forward)[0]
    if kind not in _USUAL:
        nearest = difflib.get_close_matches(forward[:_SHOWN].lower(), ACTIVATIONS, n=1, cutoff=0.0)[
            0
        ]
        raise ValueError(
            f"activation codec {forward[:_SHOWN]!r} is not known; "
            f"did you mean {nearest!r}? There are {', '.join(ACTIVATIONS)}"
        )
    gradient = gradient if comma else _USUAL[kind]
    if kind == "subspace":
        return _subspace(spec, basis)
    if "raw" in (forward, gradient):
        if forward != gradient:
            raise ValueError(f"{spec[:_SHOWN]!r}: raw goes both ways or not at all")
        return Exact()
    if match := re.fullmatch("aqsgd([48])", forward):
        return AqSgd(edge, catalog.codec(f"int{match[1]}"), flat_codec(gradient))
    return (
        Masked(flat_codec(forward))
        if gradient == "mask"
        else Flat(flat_codec(forward), flat_codec(gradient))
    )


def alternatives(spec: str) -> tuple[str, ...]:
    """Return the names in a list such as `int4 | int8`, best first. Raise `ValueError` for over 8
    names, a duplicate, or one of several that needs state at both ends (subspace, aqsgd)."""
    names = tuple(name.strip() for name in spec.split("|"))
    for name in names if len(names) > 1 else ():
        kind = re.split("[:+,]", name)[0]
        if kind.startswith(("subspace", "aqsgd")):
            raise ValueError(
                f"{name[:_SHOWN]!r} cannot be one of several codecs: "
                "both ends keep something for it"
            )
    if len(set(names)) < len(names) or len(names) > MAX_ALTERNATIVES:
        raise ValueError(f"{spec[:_SHOWN]!r} names a codec twice, or more than {MAX_ALTERNATIVES}")
    return names


def known_of(spec: str) -> tuple[str, ...]:
    """Return the `alternatives` that this release knows, without those of other releases. Raise
    `ValueError` if it knows none."""
    names = alternatives(spec)
    known = [name for name in names if subspace_terms(name) is not None or _is_known(name)]
    if not known:
        activation_codec(names[0])  # raises with what is wrong
    return tuple(known)


def _is_known(name: str) -> bool:
    try:
        activation_codec(name)
    except ValueError:
        return False
    return True


def flat_codec(name: str) -> Codec:
    """Return the named `catalog` codec of exact length, or `hadamard4`, `hadamard8:32`."""
    if match := re.fullmatch("hadamard([48])(?::([1-9][0-9]{0,3}))?", name):
        return Hadamard(4 if match[1] == "4" else 8, int(match[2] or 64))
    return require_exact_length(catalog.codec(name))


@dataclass(frozen=True, slots=True)
class SubspaceTerms:
    """The parsed name of a subspace codec: the rank, and the codecs of the coordinates (None:
    uncompressed)."""

    rank: int
    forward: Codec | None
    gradient: Codec | None

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return `Subspace.max_bytes`, without needing the basis."""
        return payload_bytes(
            self.rank, self.forward if ctx.direction == "forward" else self.gradient, ctx
        )


def subspace_terms(spec: str) -> SubspaceTerms | None:
    """Return a subspace codec's terms, None for another codec; raise `ValueError` for a malformed
    name."""
    forward, comma, gradient = spec[: 2 * _SHOWN].partition(",")
    if re.split("[:+]", forward)[0] != "subspace":
        return None
    match = re.fullmatch(r"subspace:([1-9][0-9]{0,4})(?:\+([a-z0-9:/]+))?", forward)
    if not match:
        raise ValueError(
            f"{forward[:_SHOWN]!r} is not known; did you mean 'subspace:40' or 'subspace:40+bf16'?"
        )
    gradient = gradient if comma else _USUAL["subspace"]
    return SubspaceTerms(int(match[1]), _coordinates(match[2] or "bf16"), _coordinates(gradient))


def max_bytes(spec: str, ctx: ActivationContext) -> int:
    """Return the size of the largest payload of a name or its `alternatives`; raise `ValueError` if
    none is known."""
    terms = subspace_terms(spec)
    if terms is not None:
        return terms.max_bytes(ctx)
    return max(activation_codec(name).max_bytes(ctx) for name in known_of(spec))


def _coordinates(name: str) -> Codec | None:
    return None if name == "raw" else flat_codec(name)


def _subspace(spec: str, basis: Basis | None) -> ActivationCodec:
    terms = subspace_terms(spec)
    assert terms is not None, "another codec"
    if basis is None or basis.rank != terms.rank:
        raise ValueError(
            f"subspace:{terms.rank} needs the run's basis of rank {terms.rank}, "
            f"got {f'one of {basis.rank}' if basis else 'none'}: "
            "fetch it by the digest in the run's record"
        )
    return Subspace(basis, terms.forward, terms.gradient)
