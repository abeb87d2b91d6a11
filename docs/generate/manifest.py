"""docs/reference/manifest.md: every key of a manifest, read from its structs."""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from generate.page import Words, code, docstring, page, paragraphs, table

from farflock.node.model.llama import _LIMITS, PRESETS
from farflock.node.run import planned_paths, policies
from farflock.node.run.manifest import Manifest, resolve
from farflock.node.run.model_section import ModelSection, UserModel
from farflock.node.run.sections import MAX_MANIFEST_BYTES
from farflock.optimizers.parts.inner import InnerName

INTRO = f"""
A manifest is a TOML file of at most {MAX_MANIFEST_BYTES // 1024} KiB. An empty file is a valid
one. `farflock run RUN.toml --dry-run` prints it *resolved*, with every value spelt out; the
resolved form is what peers hash, sign and send. `--set train.lr=0.01` overrides one value. A
misspelt key, a wrong type or an impossible value is refused with its place.
"""
PROGRAM = """
A program that trains its own model with `farflock.SwarmOptimizer` writes no manifest. Its first
peer makes one from the optimizer's arguments, with `[run]` but for the total of tokens, `[method]`,
`[exchange]` and `[trust]` as above, and with a `[model]` that describes what cannot be sent. Data
and inner steps are the program's own.
"""
COMPUTED = {  # filled in when the manifest is resolved
    **dict.fromkeys(
        [f"model.{name}" for name in ("dim", "layers")],
        "the preset's",
    ),
    **dict.fromkeys(
        [f"model.{name}" for name in ("heads", "kv_heads", "ffn_dim", "context")],
        "the preset's, or computed",
    ),
    "model.weights": "computed, or none",
    "model.licence": "the folder's, or none",
    "data.corpus": "`shakespeare`, unless the data are prepared",
    **dict.fromkeys(["data.root", "data.mix"], "computed, with `--data`"),
    "data.copies": "2, with `--data`",
    "data.urls": "none",
    "data.sha256": "computed, for a corpus",
    **dict.fromkeys(
        [f"data.{name}" for name in ("tokenizer_bytes", "tokenizer_chunks", "vocabulary")],
        "computed, for a file",
    ),
    "train.warmup_tokens": "computed",
    "pipeline.asynchronous.versions": "computed",
    "pipeline.kept": "computed, at least 256",
    "pipeline.plan.servers": "computed",
}
ALTERNATIVES = ("visited", "forward_s", "line_s", "turns", "swaps")  # to lanes
NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}


def make() -> str:
    """Return the page."""
    words = Words("manifest")
    sections = {
        f"[{name}]": _section(name, kind, words)
        for name, kind in _structs(Manifest, "")
        if name != "pipeline.plan"
    }
    plan = (
        paragraphs(docstring(planned_paths.PathTerms)),
        paragraphs(docstring(planned_paths.HostTerms)),
    )
    rows = [
        *_rows("pipeline.plan", planned_paths.PathTerms, words),
        *_rows("pipeline.plan", planned_paths.HostTerms, words),
    ]
    sections["[pipeline.plan]"] = "\n\n".join((*plan, _table(rows)))
    sections["An empty manifest, resolved"] = f"```toml\n{resolve({}).canonical().decode()}```"
    rows = _rows("program", UserModel, words)
    sections["[model] of a program"] = f"{PROGRAM.strip()}\n\n{_table(rows)}"
    words.close()
    return page("The manifest", INTRO, sections)


def _structs(kind: type[msgspec.Struct], prefix: str) -> list[tuple[str, type[msgspec.Struct]]]:
    found = []
    for field in msgspec.structs.fields(kind):
        inner = next((part for part in _parts(field.type) if _is_struct(part)), None)
        if inner is not None:
            found += [(prefix + field.name, inner), *_structs(inner, f"{prefix}{field.name}.")]
    return found


def _section(name: str, kind: type[msgspec.Struct], words: Words) -> str:
    return f"{paragraphs(docstring(kind))}\n\n{_table(_rows(name, kind, words))}"


def _table(rows: list[tuple[str, ...]]) -> str:
    return table(("key", "type", "default", "bounds", "meaning"), rows)


def _rows(section: str, kind: type[msgspec.Struct], words: Words) -> list[tuple[str, ...]]:
    rows = []
    if kind is ModelSection:
        rows.append((code("preset"), "text", code("demo"), "", _filled(words["model.preset"])))
        rows.append((code("from"), "text", "", "", words["model.from"]))
    for field in msgspec.structs.fields(kind):
        if any(_is_struct(part) for part in _parts(field.type)):
            continue
        name = f"{section}.{field.name}"
        shown = COMPUTED.get(name) or _default(field)
        rows.append(
            (code(field.name), _type(field.type), shown, _bounds(name, field), _filled(words[name]))
        )
    return rows


def _filled(text: str) -> str:
    known = {
        "presets": PRESETS,
        "inner": get_args(InnerName),
        "policies": policies.NAMES,
    }
    for name, choices in known.items():
        text = text.replace(f"{{{name}}}", ", ".join(f"`{choice}`" for choice in choices))
    return text


def _parts(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - types have no common type
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_struct(kind: Any) -> bool:  # noqa: ANN401
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _bare(kind: Any) -> tuple[Any, msgspec.Meta | None]:  # noqa: ANN401
    """Return a type without its annotation, and the annotation."""
    for part in _parts(kind):
        if hasattr(part, "__metadata__"):
            return part.__origin__, part.__metadata__[0]
    return next(part for part in _parts(kind) if part is not NoneType), None


def _type(kind: Any) -> str:  # noqa: ANN401
    bare, _ = _bare(kind)
    if get_origin(bare) is Literal:
        return ", ".join(code(choice) for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return f"list of {_type(get_args(bare)[0]).replace('list', 'lists').removesuffix('s')}s"
    return NAMES[get_origin(bare) or bare]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required and not (shown := _of_host(field.name)):
        return "required"
    if field.required:
        return shown
    value = None if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "" if field.default is None else code("{}")
    return code(str(value).lower() if isinstance(value, bool) else _plain(value))


def _of_host(name: str) -> str:
    return "alternative to `lanes`" if name in ALTERNATIVES else ""


def _plain(value: object) -> str:
    return (
        str(list(value))
        if isinstance(value, tuple)
        else f"{value:,}"
        if _long(value)
        else str(value)
    )


def _long(value: object) -> bool:
    return isinstance(value, int) and value >= 10_000


def _bounds(name: str, field: msgspec.structs.FieldInfo) -> str:
    section, _, key = name.partition(".")
    if section == "model" and key in _LIMITS:
        low, high = _LIMITS[key]
        return f"{low:,} to {high:,}"
    _, meta = _bare(field.type)
    return "" if meta is None else _said(meta)


def _said(meta: msgspec.Meta) -> str:
    words = (
        ("at least", meta.ge),
        ("above", meta.gt),
        ("at most", meta.le),
        ("below", meta.lt),
        ("at least", meta.min_length),
    )
    said = [f"{word} {_number(value)}" for word, value in words if value is not None]
    if meta.min_length is not None:
        said[-1] += " of them"
    if meta.max_length is not None:
        said.append(f"at most {meta.max_length} long")
    elif meta.pattern is not None:
        said.append(code(meta.pattern))
    return ", ".join(said)


def _number(value: float) -> str:
    if isinstance(value, int) and value > 1 << 20 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"
