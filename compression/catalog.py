"""The registry of codecs by name, a literal dict; names with other numbers follow from it."""

import dataclasses
import difflib
import re
from collections.abc import Callable

from farflock.compression.codec import Codec
from farflock.compression.ecsq import Ecsq
from farflock.compression.floats import Half, Raw
from farflock.compression.fp4 import Fp4
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.lowrank import LowRank
from farflock.compression.sign import Sign
from farflock.compression.sparse2 import TopK2
from farflock.compression.topk import TopK
from farflock.compression.zstd import Zstd

CODECS: dict[str, Callable[..., Codec]] = {
    "fp32": Raw,
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16"),
    "int8": Int8,
    "int4": Int4,
    "fp4": Fp4,
    "sign": Sign,
    "topk:64/4096": TopK,
    "topk2:64/4096": TopK2,
    "ecsq:100": Ecsq,
    "lowrank:4": LowRank,
    "bf16+zstd": lambda: Zstd(Half("bf16")),
}

_NUMBER = "[1-9][0-9]{0,4}"  # a number in a codec's name, one for each field of its class
_SHOWN = 64  # characters shown of a wrong name: it may come from a stranger's manifest


def codec(spec: str) -> Codec:
    """Return the codec for a name: a key of `CODECS`, perhaps with other numbers (`int8:128`,
    `topk2:8/512`) and with `+zstd`. Raise `ValueError` for anything else, with the nearest valid
    choice or what is wrong with the numbers."""
    if spec in CODECS:
        return CODECS[spec]()
    inner, plus, packer = spec.partition("+")
    if plus and packer == "zstd":
        return Zstd(codec(inner))
    kind, _, numbers = spec.partition(":")
    for name, build in CODECS.items():
        count = len(dataclasses.fields(build)) if dataclasses.is_dataclass(build) else 0
        if (
            name.partition(":")[0] == kind
            and count
            and re.fullmatch("/".join([_NUMBER] * count), numbers)
        ):
            return build(*map(int, numbers.split("/")))
    shown = spec[:_SHOWN]
    nearest = difflib.get_close_matches(shown.lower(), CODECS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"codec {shown!r} is not known; did you mean {nearest!r}? There are {', '.join(CODECS)}"
    )
