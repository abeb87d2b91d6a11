"""docs/reference/methods.md: every method with its options, read from the catalog."""

import dataclasses
import sys
from typing import Any, get_type_hints

from generate.page import Words, code, docstring, page, paragraphs, table

from farflock.node.run.manifest import resolve
from farflock.node.run.sections import SENT
from farflock.optimizers.catalog import METHODS, PRESETS
from farflock.optimizers.method import Method

INTRO = """
A method says what the peers of a run exchange and when. A manifest names it:

```toml
[method]
name = "diloco"
options = { period = 50 }

[exchange]
codec = "int8"
```

`codec`, `return_codec` and `deadline_s` belong to `[exchange]`, all other options to
`method.options`. *Equality* is what a method promises of the replicas: `exact` (the same bits
after each round), `close` (within a tolerance) or `per-peer` (nothing). Which one to take:
[choose a method](../how-to/choose-a-method.md). How to write another one: [new
method](../how-to/new-method.md). Methods of `optimizers/contrib/` come with a smaller promise:
their laws are tested, but the core does not depend on them.
"""


def make() -> str:
    """Return the page."""
    words = Words("options")
    sections = {name: _section(name, words) for name in METHODS}
    words.close()
    rows = [
        (
            code(name),
            code(base),
            ", ".join(code(f"{key} = {_plain(value)}") for key, value in options.items()),
        )
        for name, (base, options) in PRESETS.items()
    ]
    sections = {"Presets": table(("preset", "method", "options"), rows), **sections}
    return page("Methods", INTRO, sections)


def _section(name: str, words: Words) -> str:
    kind = METHODS[name]
    module = sys.modules[kind.__module__]
    made: Method = kind()
    place = kind.__module__.removeprefix("farflock.").replace(".", "/")
    fields = [field for field in dataclasses.fields(kind) if not field.name.startswith("_")]
    rows = [
        (
            code(field.name),
            _where(field.name),
            _default(name, field, made),
            words.first(f"{name}.{field.name}", field.name),
        )
        for field in fields
    ]
    options = table(("option", "in", "default", "meaning"), rows) if rows else "It has no options."
    facts = f"Code: `{place}.py`. Equality: `{made.equality}`."
    return "\n\n".join((paragraphs(docstring(module)), facts, paragraphs(docstring(kind)), options))


def _where(option: str) -> str:
    return code("[exchange]" if option in SENT else "method.options")


def _default(name: str, field: dataclasses.Field[Any], made: Method) -> str:
    table = resolve({"method": {"name": name}})
    options = {**table.method.options, **{one: getattr(table.exchange, one) for one in SENT}}
    value = getattr(made, field.name)
    if value is None:
        return "left out"
    choices = getattr(get_type_hints(type(made))[field.name], "__args__", ())
    shown = code(_plain(options.get(field.name, value)))
    others = [choice for choice in choices if isinstance(choice, str | int) and choice != value]
    return shown + (f" (or {', '.join(code(choice) for choice in others)})" if others else "")


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_plain(each)}" for key, each in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
