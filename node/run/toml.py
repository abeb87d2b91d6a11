"""A TOML writer: the standard library only reads TOML, and manifests need the same bytes
everywhere."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

FOLDED = 512  # longest array on one line: readers refuse long lines


def to_toml(tables: Mapping[str, Any]) -> str:
    """Return tables of scalars, arrays and tables as TOML, in order, leaving out None and empty
    tables."""
    return "\n".join(_lines(tables, ())).lstrip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    here = {
        name: value
        for name, value in table.items()
        if not isinstance(value, dict) and value is not None
    }
    if path and here:
        yield ""
        yield f"[{'.'.join(_key(name) for name in path)}]"
    for name, value in here.items():
        yield f"{_key(name)} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, (*path, name))


def _key(name: str) -> str:
    return (
        name
        if name.isascii() and name.replace("_", "").replace("-", "").isalnum()
        else _value(name)
    )


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        line = f"[{', '.join(items)}]"
        return (
            line if len(line) <= FOLDED else "[\n" + "".join(f"{item},\n" for item in items) + "]"
        )
    if isinstance(value, str):
        # the only difference from JSON's strings
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
