"""Print one table of how the house is built, to be held against the same table of another commit.

    python tests/tidy/measure.py [ROOT] [--json]

A room is a folder of the four packages; experiments and tests count only as lines and as links of
import chains. The code is read and not run, except to time `import farflock.node.cli`.
"""

import argparse
import ast
import functools
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("node", "swarm", "optimizers", "compression")
MAX_METHODS, MAX_ATTRIBUTES, MAX_PARAMETERS, MAX_CALLABLES = 25, 20, 8, 2
MAX_FUNCTION, MAX_FILE, MAX_ROOM = 70, 600, 25
MAX_LOOP = 120  # lines of node/loop.py, which a reader sees first, on one screen
IMPORT_RUNS = 7
TYPE_MAKERS = {"NewType", "TypeVar", "ParamSpec"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = Mapping[str, ast.Module]
Graph = Mapping[str, set[str]]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, parsed once for all tests that read it; do not change either."""
    return ast.parse(path.read_text())


def read(root: Path, *folders: str) -> dict[str, ast.Module]:
    """The parsed files of these folders by dotted name, without the leading farflock."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts): parsed(path) for path in paths}


def last_word(node: ast.expr) -> str:
    """`Callable` of `abc.Callable[[int], str]`; empty for anything but a name or its subscript."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return getattr(node, "attr", "") or getattr(node, "id", "")


def aliases(tree: ast.Module) -> dict[str, ast.expr]:
    """The type aliases at the top of a module: capitalised words bound to type expressions."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            is_made = isinstance(value, ast.Call) and last_word(value.func) in TYPE_MAKERS
            is_type = isinstance(value, ast.Subscript | ast.Name | ast.Attribute | ast.BinOp)
            if name[0].isupper() and not name.isupper() and (is_type or is_made):
                found[name] = value
    return found


def names_defined_twice(trees: Trees) -> dict[str, str]:
    """Public classes and type aliases that two modules define, with the modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in own | aliases(tree).keys():
            homes[name].append(module)
    several = {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}
    return {name: ", ".join(modules) for name, modules in several.items() if name[0] != "_"}


def methods(node: ast.ClassDef) -> list[Function]:
    """The functions of a class body; properties and dunder methods are among them."""
    return [part for part in node.body if isinstance(part, Function)]


def attributes(node: ast.ClassDef) -> set[str]:
    """Annotations of the class body, and what any of its methods assigns to `self`; a class whose
    bases have `total` is the type of a dictionary, and has keys."""
    if any(keyword.arg == "total" for keyword in node.keywords):
        return set()
    fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
    stored = [
        part
        for method in methods(node)
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
    ]
    own = {part.attr for part in stored if last_word(part.value) == "self"}
    return own | {last_word(field) for field in fields}


def parameters(node: ast.ClassDef) -> list[ast.arg]:
    """The parameters of `__init__` without self; none where a dataclass or Struct generates it."""
    found = [method.args for method in methods(node) if method.name == "__init__"]
    return [arg for args in found for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs][1:]]


def members(annotation: ast.expr | None) -> list[str]:
    """The words of a union: `Callable` and an empty one for `Callable[[], int] | None`."""
    if isinstance(annotation, ast.BinOp):
        return members(annotation.left) + members(annotation.right)
    return [] if annotation is None else [last_word(annotation)]


def imports(trees: Trees) -> Graph:
    """The imports of each module among the others, also inside functions."""
    found: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[module] |= {alias.name.removeprefix("farflock.") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = (node.module or "").removeprefix("farflock.")
                inner = {f"{source}.{alias.name}" for alias in node.names} & trees.keys()
                found[module] |= inner or {source}
    return {module: (used & trees.keys()) - {module} for module, used in found.items()}


def reachable(graph: Graph) -> Graph:
    """Everything that each node leads to, itself only if it is part of a cycle."""
    found = {node: set(following) for node, following in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in found[node]:
                found[node] |= found[middle]
    return found


def cycles(graph: Graph) -> list[str]:
    """Groups of nodes that all lead to each other."""
    reach = reachable(graph)
    groups = [sorted(other for other in reach[node] if node in reach[other]) for node in graph]
    return sorted({", ".join(group) for group in groups if group})


def longest_chain(graph: Graph) -> list[str]:
    """The longest way along the edges; a cycle counts as one node, named by one of its members."""
    reach, best = reachable(graph), dict[str, list[str]]()
    # all that it leads to comes first
    for node in sorted(graph, key=lambda node: len(reach[node])):
        group = {node} | {other for other in reach[node] if node in reach[other]}
        tails = [best[next_one] for member in group for next_one in graph[member] - group]
        best[node] = [node, *max(tails, key=len, default=[])]
    return max(best.values(), key=len)


def lines_of(root: Path, *folders: str) -> tuple[int, int]:
    """Lines that are not blank, and lines with a comment."""
    texts = [path.read_text() for folder in folders for path in (root / folder).rglob("*.py")]
    comments = sum(
        token.type == tokenize.COMMENT
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return sum(bool(line.strip()) for text in texts for line in text.splitlines()), comments


def statements(tree: ast.Module) -> int:
    """Statements except imports, definitions and docstrings: formatting and prose add none."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    named = (ast.Import, ast.ImportFrom, ast.ClassDef, *Function.__args__)
    prose = [
        node
        for node in found
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return sum(not isinstance(node, named) for node in found) - len(prose)


def import_ms(root: Path) -> int:
    """Median milliseconds of `import farflock.node.cli`, as fresh interpreters measure them."""
    code = "from time import time; t = time(); import farflock.node.cli; print(time() - t)"
    run = [sys.executable, "-c", code]
    texts = [subprocess.check_output(run, cwd=root, text=True) for _ in range(IMPORT_RUNS)]
    return round(1000 * statistics.median(map(float, texts)))


def above(limit: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Those over the limit, largest first."""
    return {name: count for name, count in Counter(counts).most_common() if count > limit}


def class_rows(trees: Trees) -> dict[str, object]:
    """Sizes of classes and of their constructors, and which are over the house's limits."""
    parts = {
        f"{module}:{node.name}": node
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    called = {"Callable"} | {
        name
        for tree in trees.values()
        for name, value in aliases(tree).items()
        if last_word(value) == "Callable"
    }
    taken = {name: parameters(node) for name, node in parts.items()}
    functions = {
        name: sum(not called.isdisjoint(members(arg.annotation)) for arg in given)
        for name, given in taken.items()
    }
    by_methods = {name: len(methods(node)) for name, node in parts.items()}
    by_attributes = {name: len(attributes(node)) for name, node in parts.items()}
    return {
        "most methods of a class": max(by_methods.values()),
        f"classes over {MAX_METHODS} methods": above(MAX_METHODS, by_methods),
        "most attributes of a class": max(by_attributes.values()),
        f"classes over {MAX_ATTRIBUTES} attributes": above(MAX_ATTRIBUTES, by_attributes),
        f"constructors over {MAX_PARAMETERS} parameters": above(
            MAX_PARAMETERS, {name: len(given) for name, given in taken.items()}
        ),
        f"constructors over {MAX_CALLABLES} callables": above(MAX_CALLABLES, functions),
    }


class Excess(NamedTuple):
    """One thing that is larger than its limit; both are counts of `what`."""

    what: str
    name: str
    size: int
    limit: int

    @property
    def percent(self) -> float:
        """The excess in percent of the limit, so that lines and methods can be added up."""
        return 100 * (self.size / self.limit - 1)


def excesses(root: Path) -> list[Excess]:
    """Return everything in a checkout that is larger than its limit, the largest excess first."""
    trees = read(root, *PACKAGES, "experiments")
    lines = {
        module: len((root / f"{module.replace('.', '/')}.py").read_text().splitlines())
        for module in trees
    }
    classes = {
        f"{module}:{node.name}": node
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    functions = {
        f"{module}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }
    files = (
        path
        for folder in (*PACKAGES, "experiments", "tests")
        for path in (root / folder).rglob("*.py")
    )
    rooms = Counter(
        path.parent.relative_to(root).as_posix() for path in files if path.name != "__init__.py"
    )
    counted = (
        ("lines of a function", MAX_FUNCTION, functions),
        ("lines of a file", MAX_FILE, lines),
        ("lines of the loop", MAX_LOOP, {"node.loop": lines["node.loop"]}),
        ("files of a room", MAX_ROOM, rooms),
        ("methods", MAX_METHODS, {name: len(methods(node)) for name, node in classes.items()}),
        (
            "attributes",
            MAX_ATTRIBUTES,
            {name: len(attributes(node)) for name, node in classes.items()},
        ),
        (
            "parameters of a constructor",
            MAX_PARAMETERS,
            {name: len(parameters(node)) for name, node in classes.items()},
        ),
    )
    found = [
        Excess(what, name, size, limit)
        for what, limit, sizes in counted
        for name, size in sizes.items()
        if size > limit
    ]
    return sorted(found, key=lambda each: -each.percent)


def measure(root: Path) -> dict[str, object]:
    """All numbers of a checkout by name, in the order of the table."""
    ours, others = read(root, *PACKAGES), read(root, "experiments")
    rooms = {module: module.rpartition(".")[0] for module in ours}
    # A module at a package's root is a seam of its own: rooms stand on some and under others.
    places = {module: module if room in PACKAGES else room for module, room in rooms.items()}
    graph, files = imports({**ours, **others}), Counter(rooms.values())
    between: dict[str, set[str]] = {place: set() for place in places.values()}
    for module, place in places.items():
        between[place] |= {places[used] for used in graph[module] & ours.keys()} - {place}
    lines, comments = lines_of(root, *PACKAGES, "experiments")
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in (*ours.values(), *others.values())
        for node in ast.walk(tree)
        if isinstance(node, Function)
    )
    chain = longest_chain(graph)
    return {
        "files a room": dict(sorted(files.items())),
        "files in the fullest room": max(files.values()),
        "names defined twice": names_defined_twice(ours),
        **class_rows(ours),
        "longest import chain": len(chain),
        "its modules": " > ".join(chain),
        "cycles between rooms": cycles(between),
        "lines of source": lines,
        "statements of source": sum(map(statements, (*ours.values(), *others.values()))),
        "lines of tests": lines_of(root, "tests")[0],
        "function length, median": statistics.median(lengths),
        "function length, 95 %": lengths[int(0.95 * len(lengths))],
        "function length, longest": lengths[-1],
        "comment lines per 100 lines": round(100 * comments / lines, 1),
        "import of the command line, ms": import_ms(root),
    }


def rows(found: Mapping[str, object]) -> Iterator[str]:
    """The lines of the table; what consists of several things is counted, then listed."""
    for name, value in found.items():
        yield f"{name:<34} {len(value) if isinstance(value, dict | list) else value}"
        if isinstance(value, dict):
            yield from (f"    {key:<42} {each}" for key, each in value.items())
        elif isinstance(value, list):
            yield from (f"    {each}" for each in value)


def main() -> None:
    """Print the table of a checkout, or the same as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    given = parser.parse_args()
    found = measure(given.root.resolve())
    print(json.dumps(found, indent=1) if given.json else "\n".join(rows(found)))


if __name__ == "__main__":
    main()
