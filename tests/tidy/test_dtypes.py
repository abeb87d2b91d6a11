"""Tensors name their type: a program around ours may set torch's default to another one."""

import ast
from pathlib import Path

from tidy import measure

ROOT = Path(__file__).parents[2]
HOUSES = ("compression", "node", "optimizers", "swarm")
MAKERS = {"empty", "full", "ones", "rand", "randn", "zeros"}


def nameless(tree):
    """The lines on which a tensor is made of torch's default type."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS
            and "dtype" not in {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno


def test_no_tensor_has_the_type_that_happens_to_be_the_default():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for house in HOUSES
        for path in (ROOT / house).rglob("*.py")
        for line in nameless(measure.parsed(path))
    }
    assert not found


def test_it_would_be_found():
    code = "torch.zeros(3)\ntorch.zeros(3, dtype=torch.float32)\nx.new_zeros(3)\ntorch.full((), 1)"
    assert list(nameless(ast.parse(code))) == [1, 4]
