"""Tests look at what a user of a class can see, so that the code behind it may change.

A private attribute of another object is reached for only where nothing public shows the same.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MAX_ACCESSES = 65  # over all tests; lower it with each one that goes


OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")  # public, says Python's library


def private_accesses(tree):
    """Attributes with one leading underscore, of anything but `self`, `cls` and torch, whose
    interface to devices has such names."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in OF_NAMED_TUPLES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and root(node) != "torch"
    ]


def root(node):
    """The name at which a chain of attributes begins; None if that is no name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_tests_hardly_reach_for_private_attributes():
    found = {
        path.relative_to(TESTS).as_posix(): len(private_accesses(ast.parse(path.read_text())))
        for path in sorted(TESTS.rglob("*.py"))
    }
    total, where = sum(found.values()), {path: count for path, count in found.items() if count}
    assert total <= MAX_ACCESSES, where


@pytest.mark.parametrize("source", ["peer._links", "peer.links._inbox", "made()._x = 1"])
def test_a_private_access_is_found(source):
    assert len(private_accesses(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "self._links",
        "cls._links",
        "peer.links",
        "peer.__dict__",
        "torch._C._acc",
        "peer._replace()",
    ],
)
def test_a_class_s_own_attributes_and_public_ones_are_left_alone(source):
    assert not private_accesses(ast.parse(source))
