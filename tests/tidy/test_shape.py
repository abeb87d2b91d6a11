"""One word has one meaning, and a class one subject that can be seen at a glance."""

import ast
from pathlib import Path

import pytest
from tidy import measure

ROOT = Path(__file__).parents[2]
TREES = measure.read(ROOT, *measure.PACKAGES)
MAX_METHODS, MAX_ATTRIBUTES = measure.MAX_METHODS, measure.MAX_ATTRIBUTES
MAX_EXCEPTIONS = 5
# Classes that may be larger, each with its reason.
EXCEPTIONS = {
    "node.library.swarm_optimizer:SwarmOptimizer": (
        "public: the members of torch's Optimizer, and the swarm's options"
    ),
    "node.process.status:Status": (
        "a Struct: its attributes are the fields of the status file's JSON"
    ),
    "node.run.pipeline_section:PipelineSection": (
        "a Struct: its attributes are the keys of the manifest's [pipeline]"
    ),
    "optimizers.contrib.asynchronous:Async": (
        "contrib: its options are attributes, as a method's are"
    ),
    "optimizers.contrib.edit:EDiT": "contrib: its options are attributes, as a method's are",
}
CLASSES = {
    f"{module}:{node.name}": node
    for module, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}


def over(limit, size):
    """The classes that are larger, but for the exceptions."""
    sizes = {name: size(node) for name, node in CLASSES.items() if name not in EXCEPTIONS}
    return {name: count for name, count in sizes.items() if count > limit}


def test_no_public_name_is_defined_twice():
    assert not measure.names_defined_twice(TREES)


def test_a_name_that_is_defined_twice_is_found():
    source = "class Plan: ...\nShapes = dict[str, int]\nLIMIT = 3\nclass _Mine: ..."
    twice = measure.names_defined_twice({"a": ast.parse(source), "b": ast.parse(source)})
    assert set(twice) == {"Plan", "Shapes"}


def test_no_class_has_more_methods_than_one_can_know():
    assert not over(MAX_METHODS, lambda node: len(measure.methods(node)))


def test_no_class_has_more_attributes_than_one_can_know():
    assert not over(MAX_ATTRIBUTES, lambda node: len(measure.attributes(node)))


@pytest.mark.parametrize(
    "limit", ["constructors over 8 parameters", "constructors over 2 callables"]
)
def test_no_constructor_takes_more_than_it_can_say(limit):
    assert not measure.class_rows(TREES)[limit].keys() - EXCEPTIONS.keys()


def test_the_exceptions_are_few_there_and_needed():
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS
    sizes = {
        name: (measure.methods(CLASSES[name]), measure.attributes(CLASSES[name]))
        for name in EXCEPTIONS
    }
    needless = [
        name
        for name, (own, kept) in sizes.items()
        if len(own) <= MAX_METHODS and len(kept) <= MAX_ATTRIBUTES
    ]
    assert not needless
