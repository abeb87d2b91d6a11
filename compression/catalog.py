"""The codecs by name: the only registry, a literal dict."""

import difflib
from collections.abc import Callable

from farflock.compression.codec import Codec
from farflock.compression.half import Half
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.raw import Raw
from farflock.compression.topk import TopK
from farflock.compression.zstd import Zstd

CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Raw,
    "fp16": lambda: Half("fp16"),
    "bf16": lambda: Half("bf16"),
    "int8": Int8,
    "int4": Int4,
    "topk:64/4096": TopK,
    "bf16+zstd": lambda: Zstd(Half("bf16")),
}


def codec(spec: str) -> Codec:
    """The codec of a specification: `int8`, `int8:128`, `topk:64/4096`, any of them with `+zstd`; `ValueError` with the
    nearest valid choice for anything else."""
    if spec.endswith("+zstd"):
        return Zstd(codec(spec.removesuffix("+zstd")))
    kind, _, parameters = spec.partition(":")
    try:
        match kind:
            case "int8" | "int4" if parameters:
                return (Int8 if kind == "int8" else Int4)(int(parameters))
            case "topk":
                k, chunk = (int(part) for part in parameters.split("/"))
                return TopK(k, chunk)
    except ValueError as error:
        raise ValueError(
            f"codec {spec!r} is not well formed ({error}); a valid one is int8:128 or topk:64/4096"
        ) from None
    if spec in CODECS:
        return CODECS[spec]()
    close = difflib.get_close_matches(spec, CODECS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(CODECS)}"
    raise ValueError(f"codec {spec!r} is not known; {hint}")
