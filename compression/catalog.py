"""The codecs by name: the only registry, a literal dict, and the names with numbers in them."""

import difflib
import re
from collections.abc import Callable

from farflock.compression.codec import Codec
from farflock.compression.ecsq import Ecsq
from farflock.compression.fp4 import Fp4
from farflock.compression.half import Half
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.lowrank import LowRank
from farflock.compression.raw import Raw
from farflock.compression.sign import Sign
from farflock.compression.sparse2 import TopK2
from farflock.compression.topk import TopK
from farflock.compression.zstd import Zstd

CODECS: dict[str, Callable[[], Codec]] = {
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

_WITH_NUMBERS: dict[str, Callable[..., Codec]] = {
    r"int8:([1-9][0-9]{0,4})": Int8,
    r"int4:([1-9][0-9]{0,4})": Int4,
    r"fp4:([1-9][0-9]{0,4})": Fp4,
    r"sign:([1-9][0-9]{0,4})": Sign,
    r"topk:([1-9][0-9]{0,4})/([1-9][0-9]{0,4})": TopK,
    r"topk2:([1-9][0-9]{0,4})/([1-9][0-9]{0,4})": TopK2,
    r"ecsq:([1-9][0-9]{0,4})": Ecsq,
    r"lowrank:([1-9][0-9]{0,4})": LowRank,
}

_SHOWN = 64  # characters of a wrong name that are looked at: it may come from a stranger's manifest


def codec(spec: str) -> Codec:
    """The codec of a name: a key of `CODECS`, `int8:128`, `sign:64`, `topk2:8/512`, or one of these and `+zstd`.

    `ValueError` with the nearest valid choice, or with what is wrong about the numbers, for anything else.
    """
    if spec in CODECS:
        return CODECS[spec]()
    inner, plus, packer = spec.partition("+")
    if plus and packer == "zstd":
        return Zstd(codec(inner))
    for pattern, build in _WITH_NUMBERS.items():
        if match := re.fullmatch(pattern, spec):
            return build(*(int(number) for number in match.groups()))
    shown = spec[:_SHOWN]
    nearest = difflib.get_close_matches(shown.lower(), CODECS, n=1, cutoff=0.0)[0]
    raise ValueError(f"codec {shown!r} is not known; did you mean {nearest!r}? There are {', '.join(CODECS)}")
