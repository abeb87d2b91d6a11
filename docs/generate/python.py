"""docs/reference/python.md: what `import farflock` offers, and what of it is stable."""

import inspect
import re
import textwrap

from generate.page import code, docstring, page, paragraphs, table

import farflock
from farflock.optimizers.catalog import METHODS

INTRO = """
Stable is exactly what `farflock.__all__` names, with the parameters, attributes and methods that
this page shows:

{names}

Before 1.0, a minor version may change them, and the changelog says what to write instead. From 1.0
on, only a major version does. Everything else may change with any version, also what an example
imports from `farflock.node` or `farflock.optimizers`. Importing the package loads neither torch nor
the network, and type checkers know all names.
"""
METHODS_INTRO = """
A method is a name with options, or an instance of its class: `SwarmOptimizer(model,
farflock.DiLoCo(period=50))` is `SwarmOptimizer(model, "diloco", period=50)`. An instance says those
of its options that differ from their defaults, so `DiLoCo()` joins any run of DiLoCo. The page on
[methods](methods.md) explains the options. An instance of a class of your own works too, if all
peers pass the same class: the run knows it by its dotted name. How to write one:
[new method](../how-to/new-method.md).
"""
WIDTH = 100  # columns of code
FUNCTIONS = ("local_swarm", "method", "codec", "samples", "scheduled", "join_progress")
RECORDS = ("Round", "SwarmStatus")
ERRORS = ("FarflockError", "Failure", "RefusedByRun", "Usage")
OUTERS = ("OuterHeavyBall", "OuterNesterov", "OuterSGD")


def make() -> str:
    """Return the page."""
    sections = {"SwarmOptimizer": _optimizer()}
    sections |= {name: _described(name) for name in (*FUNCTIONS, *RECORDS)}
    sections["Errors"] = table(("error", "meaning"), [_row(name) for name in ERRORS])
    sections["Methods"] = METHODS_INTRO + "\n" + _methods()
    rows = [(code(_signature(name)), _first(getattr(farflock, name))) for name in OUTERS]
    sections["Outer optimizers"] = table(("class", "meaning"), rows)
    names = "\n".join(f"- `{name}`" for name in sorted(farflock.__all__))
    return page("Python", INTRO.format(names=names), sections)


def _optimizer() -> str:
    kind = farflock.SwarmOptimizer
    rows = []
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        written = name if isinstance(member, property) else name + _plain(member, skip=1)
        rows.append((code(written), _first(member)))
    return "\n\n".join((_described("SwarmOptimizer"), table(("member", "meaning"), rows)))


def _methods() -> str:
    names = {kind.__name__: name for name, kind in METHODS.items()}
    rows = [(code(_signature(kind)), code(name)) for kind, name in sorted(names.items())]
    return table(("class", "name"), rows)


def _row(name: str) -> tuple[str, str]:
    return code(name), _first(getattr(farflock, name))


def _described(name: str) -> str:
    shown = _wrapped(_signature(name))
    return f"```python\n{shown}\n```\n\n{paragraphs(docstring(getattr(farflock, name)))}"


def _wrapped(signature: str) -> str:
    """Return a signature as the formatter of the project's code would leave it."""
    signature = signature.replace("'", '"')
    if len(signature) <= WIDTH:
        return signature
    called, _, parameters = signature.removesuffix(")").partition("(")
    indent = "    "
    lines = textwrap.fill(
        parameters, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
    return f"{called}(\n{lines}\n)"


def _signature(name: str) -> str:
    return f"farflock.{name}{_plain(getattr(farflock, name))}"


def _plain(member: object, skip: int = 0) -> str:
    """Return parameters and defaults without types and without what is no option."""
    assert callable(member)
    parameters = list(inspect.signature(member).parameters.values())[skip:]
    shown = [
        each.replace(annotation=each.empty) for each in parameters if not each.name.startswith("_")
    ]
    text = str(inspect.Signature(shown))
    return re.sub(r"<factory>", "...", text)


def _first(thing: object) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join(paragraphs(docstring(thing)).split("\n\n")[0].split())
