"""The code behind a job: a hash over the syntax of all modules that it imports, transitively.

A change to a page, a comment, a docstring, the layout or another method leaves measured arms valid;
a change to the loop, the links or this method's arithmetic does not. The catalogues import
everything, so they are left out; the named method and its codecs are added instead.
"""

import ast
import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

import farflock
from farflock.compression.catalog import codec
from farflock.optimizers.catalog import METHODS

ROOTS = {
    "line": ["farflock.experiments.reproduce.line"],
    "swarm": ["farflock.experiments.reproduce.swarm_arm"],
    "noise": ["farflock.experiments.reproduce.noise"],
}
CATALOGUES = ("farflock.optimizers.catalog", "farflock.compression.catalog")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGE = Path(farflock.__file__).parent


def code_version(job: msgspec.Struct) -> str:
    """Return the hash of a job's code, and the version of torch."""
    modules = list(ROOTS[str(type(job).__struct_config__.tag)])
    method, options = getattr(job, "method", None), getattr(job, "options", {})
    if method is not None:
        modules += [METHODS[method].__module__, *codecs_of(method, options)]
    return (
        f"{sources_hash(tuple(sorted(set(modules))))} torch {torch.__version__.partition('+')[0]}"
    )


@functools.cache
def sources_hash(roots: tuple[str, ...]) -> str:
    """Return the SHA-256 over the syntax of these modules and their imports, by name."""
    digest = hashlib.sha256()
    for name, path in sorted(closure(roots).items()):
        digest.update(f"{name} {_syntax_hash(path.read_text())} ".encode())
    return digest.hexdigest()


@functools.cache  # by the whole source: the arms of a study share most of their modules
def _syntax_hash(source: str) -> str:
    """Return the SHA-256 of a module's syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
        if not getattr(node, "type_params", True):
            del node.type_params  # type: ignore[attr-defined]  # only Python 3.12 has this field
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def closure(roots: Iterable[str]) -> dict[str, Path]:
    """Return the files of `roots` and of our modules that they import, without the catalogues."""
    found: dict[str, Path] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if path is None or name in found or name in CATALOGUES:
            continue
        found[name] = path
        waiting += _imported(path.read_text())
    return found


@functools.cache
def _imported(source: str) -> tuple[str, ...]:
    """Return the names of ours that a module imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("farflock."):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.startswith("farflock.")]
    return tuple(names)


def _file(name: str) -> Path | None:
    path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return path if path.is_file() else None


def codecs_of(method: str, options: dict[str, Any]) -> list[str]:
    """Return the modules of a method's codecs, from its options or its defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(METHODS[method])} | options
    named = [
        value for name, value in fields.items() if name.endswith("codec") and isinstance(value, str)
    ]
    return [
        type(codec(layer)).__module__ for name in named for layer in (name, name.partition("+")[0])
    ]
