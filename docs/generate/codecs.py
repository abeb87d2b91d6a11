"""docs/reference/codecs.md: every codec with its parameters and its bytes."""

import dataclasses
import re
import sys

import torch
from generate.page import Words, code, docstring, page, paragraphs, table

from farflock.compression.activation_catalog import ACTIVATIONS, MAX_ALTERNATIVES
from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Codec, Context
from farflock.compression.zstd import Zstd

VALUES, COLUMNS = 1 << 18, 512
INTRO = """
A codec turns tensors into bytes and back. It has no state; what a coarse one leaves out is kept
by the method (error feedback) and by the reducers. A name may carry other numbers (`int8:128`,
`topk:32/4096`) and `+zstd`. A *biased* codec loses mass in one direction, so a method must give
it feedback, and those that cannot refuse it. [The wire format](../wire-format.md) defines every
payload to the bit; [a new codec](../how-to/new-codec.md) shows how to write one.
"""


def make() -> str:
    """Return the page."""
    words = Words("codecs")
    rows = [_row(name) for name in CODECS]
    heads = ("codec", "bits a value", "biased", "may be `+zstd`")
    sections = {"At a glance": _measured() + table(heads[:3], rows)}
    sections |= {_kind(name): _section(name, words) for name in CODECS if name != "bf16"}
    words.close()
    sections["Activation codecs"] = _activations()
    return page("Codecs", INTRO, sections)


def _measured() -> str:
    return (
        f"Bits a value of {VALUES:,} normal values in rows of {COLUMNS}, all overhead included;"
        " `ecsq` and `zstd` depend on the values.\n\n"
    )


def _row(name: str) -> tuple[str, ...]:
    one = codec(name)
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    size = one.encode(values, Context(columns=COLUMNS), bytearray())
    return code(name), f"{8 * size / VALUES:.3g}", "yes" if one.biased else "no"


def _kind(name: str) -> str:
    if name in ("fp16", "bf16"):
        return "fp16 and bf16"
    return "+zstd" if "+" in name else name.partition(":")[0]


def _section(name: str, words: Words) -> str:
    one = codec(name)
    module = sys.modules[type(one).__module__]
    parameters = _parameters(one)
    rows = [
        (code(field.name), code(getattr(one, field.name)), words[f"{_kind(name)}.{field.name}"])
        for field in parameters
    ]
    written = (
        f"Written `{one.name}`" if not parameters else f"Written `{_pattern(name, parameters)}`"
    )
    parts = [paragraphs(docstring(module)), paragraphs(docstring(type(one))), f"{written}."]
    if rows:
        parts.append(table(("parameter", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _parameters(one: Codec) -> list["dataclasses.Field[object]"]:
    """Return the fields that are numbers in the codec's name."""
    if isinstance(one, Zstd) or not dataclasses.is_dataclass(one):
        return []
    return [field for field in dataclasses.fields(one) if field.type is int or field.type == "int"]


def _pattern(name: str, parameters: list["dataclasses.Field[object]"]) -> str:
    return f"{_kind(name)}:{'/'.join(field.name.upper() for field in parameters)}"


def _activations() -> str:
    words = Words("activations")
    rows = []
    for name, gradient in ACTIVATIONS.items():
        rows.append((code(name), code(gradient), words[re.split("[:+]", name)[0]]))
    words.close()
    intro = (
        "Codecs of `pipeline.codec`, for what passes between the stages of a model. A name may"
        " carry the gradient's codec after a comma (`int4,int4`); left out, it is the one in the"
        " table."
        f" `int4 | int8` names several in order of preference, at most {MAX_ALTERNATIVES}: each"
        " edge has the first that both of its ends read."
        " [The activation format](../activation-format.md) defines the payloads.\n\n"
    )
    return intro + table(("codec", "gradient", "what is sent"), rows)
