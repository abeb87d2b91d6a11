"""A run is a function of its seed: no result depends on the order of a set's hashes.

That order differs between processes. An expression counts as a set if that can be seen in it, or
if it is a name and its function or class binds it to sets alone.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from tidy import measure

TREES = measure.read(Path(__file__).parents[2], *measure.PACKAGES)
TYPES = {"set", "frozenset", "Set", "AbstractSet"}
MERGES = {"union", "intersection", "difference", "symmetric_difference"}
READS = {"get", "pop", "setdefault"}  # of a mapping, with what is returned where nothing is
IN_ORDER = {
    "list",
    "tuple",
    "iter",
    "enumerate",
    "zip",
    "map",
    "filter",
    "deque",
    "fromkeys",
    "join",
    "extend",
    "chain",
}
IN_NO_ORDER = {"sorted", "set", "frozenset", "any", "all", "sum", "min", "max", "Counter"}


def last_word(node):
    return measure.last_word(node.func if isinstance(node, ast.Call) else node)


def spelt(node):
    """The source of a target; most are names, and `ast.unparse` is slow."""
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def is_set(node, known):
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=[*_, _]):
            return (method in MERGES and is_set(value, known)) or (
                method in READS and is_set(node.args[-1], known)
            )
        case ast.Call():
            return last_word(node) in ("set", "frozenset")
        case ast.BinOp(left=left, op=ast.Sub() | ast.BitAnd(), right=right):
            keys = any(
                isinstance(side, ast.Call) and last_word(side) == "keys" for side in (left, right)
            )
            return keys or is_set(left, known) or is_set(right, known)
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitXor()):
            return is_set(left, known)
        case ast.BoolOp(values=parts):
            return any(is_set(part, known) for part in parts)
        case ast.Name() | ast.Attribute():
            return bool(known) and spelt(node) in known
    return False


def bindings(scope):
    """Each name or attribute that a function or class binds, and whether to a set."""
    for node in ast.walk(scope):
        if isinstance(node, ast.AnnAssign):
            yield spelt(node.target), last_word(node.annotation) in TYPES
        elif isinstance(node, ast.arg):
            yield node.arg, node.annotation is not None and last_word(node.annotation) in TYPES
        elif isinstance(node, ast.Assign):
            yield spelt(node.targets[0]), is_set(node.value, ())
        elif isinstance(node, ast.For | ast.comprehension | ast.NamedExpr):
            yield spelt(node.target), False


def sets_of(scope):
    """The names that a function or class binds to sets alone."""
    found = defaultdict(set)
    for name, bound_to_set in bindings(scope):
        found[name].add(bound_to_set)
    return {name for name, verdicts in found.items() if verdicts == {True}}


def passages(scope):
    """The expressions that a piece of code goes through in their order."""
    orderless = {
        id(part)
        for node in ast.walk(scope)
        for part in getattr(
            node,
            "args" if isinstance(node, ast.Call) and last_word(node) in IN_NO_ORDER else "elts",
            (),
        )
        if not isinstance(node, ast.List | ast.Tuple)
    }
    for node in ast.walk(scope):
        if isinstance(node, ast.For | ast.AsyncFor):
            yield node.iter
        elif id(node) in orderless:
            continue
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
            yield from (part.iter for part in node.generators)
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call) and last_word(node) in IN_ORDER:
            yield from node.args
        elif isinstance(node, ast.Call) and last_word(node) == "pop" and not node.args:
            yield node.func.value


def out_of_order(tree):
    """The lines that go through a set, or use a hash for anything but to compare it."""
    compared = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in ast.iter_child_nodes(node)
    }
    hashes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hash"
    ]
    found = {node.lineno for node in hashes if id(node) not in compared}
    scopes = [(tree, set())]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own = {name for name in sets_of(node) if name.startswith("self.")}
            own |= {
                f"self.{name}"
                for part in node.body
                if isinstance(part, ast.AnnAssign)
                for name in sets_of(part)
            }
            scopes += [(part, own) for part in node.body]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scopes.append((node, sets_of(node)))
    for scope, known in scopes:
        if known or scope is tree:  # else the tree has shown all that can be seen here
            found |= {node.lineno for node in passages(scope) if is_set(node, known)}
    return sorted(found)


def test_nothing_goes_through_a_set_in_the_order_of_its_hashes():
    assert not {module: lines for module, tree in TREES.items() if (lines := out_of_order(tree))}


@pytest.mark.parametrize(
    "source",
    [
        "for name in {'a', 'b'}: print(name)",
        "found = [name for name in set(names)]",
        "first = list(frozenset(names))[0]",
        "for name in here.keys() - there.keys(): print(name)",
        "def shown(names: set[str]) -> None:\n    print(*names)",
        "def shown():\n    names = {name for name in words}\n    return ', '.join(names | more)",
        "class Peer:\n    def __init__(self):\n        self.ids = set()\n"
        "    def end(self):\n        self.ids.pop()",
        "def release(pin):\n    pinned = pins.pop(pin, set())\n"
        "    for digest in pinned - kept: free(digest)",
        "place = hash(name) % 7",
    ],
)
def test_a_passage_through_a_set_is_found(source):
    assert out_of_order(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "for name in sorted({'a', 'b'}): print(name)",
        "count = sum(name in here for name in set(names))",
        "def shown(names: set[str]):\n    names = sorted(names)\n"
        "    return [name for name in names]",
        "for name in dict.fromkeys(names): print(name)",
        "rest = left - right\nfor one in [left - right]: print(one)",
        "known = sorted({*set(names), 'a'})",
        "assert hash(one) == hash(other)",
    ],
)
def test_what_has_an_order_is_left_alone(source):
    assert not out_of_order(ast.parse(source))
