"""A missing package is one sentence with the line that installs it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from farflock.node.errors import Failure, Usage
from farflock.node.extras import EXTRAS, absent, is_here, line_for, require, torch_line

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", EXTRAS)
def test_each_extra_brings_the_package_and_the_core_does_not(package):
    extras = PROJECT["optional-dependencies"]
    named = {re.split(r"[=<>]", need)[0] for need in extras[EXTRAS[package]]}
    core = {re.split(r"[=<>]", need)[0] for need in PROJECT["dependencies"]}
    assert package in named
    assert package not in core


def test_a_package_that_is_missing_is_refused_with_its_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not is_here("pyarrow")
    says = r"a.parquet: the package pyarrow is not installed; run `pip install 'farflock\[data\]'`"
    with pytest.raises(Usage, match=says):
        require("a.parquet", "pyarrow")


def test_a_package_that_is_here_is_not_refused():
    require("a plot", "matplotlib")


@pytest.mark.parametrize(
    ("platform", "files", "line"),
    [
        ("linux", (), "`pip install torch --index-url https://download.pytorch.org/whl/cpu`"),
        ("linux", ("/dev/nvidiactl", "/dev/kfd"), "`pip install torch`"),
        ("linux", ("/usr/lib/wsl/lib/libcuda.so.1",), "`pip install torch`"),
        ("linux", ("/dev/kfd",), "`pip install torch --index-url .*/whl/rocmX.Y`, where X.Y is"),
        ("darwin", (), "`pip install torch`"),
    ],
)
def test_the_line_for_torch_fits_the_machine(platform, files, line):
    assert re.match(line, torch_line(platform, lambda path: path in files))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("torch.nn", "PyTorch is not installed; run `pip install torch"),
        ("matplotlib", f"the package matplotlib is not installed; run {line_for('matplotlib')}"),
        ("fcntl", "does not run on this system: Python has no module fcntl here; use Linux, macOS"),
    ],
)
def test_an_import_that_fails_is_one_sentence(module, says):
    known = absent(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert isinstance(known, Failure)
    assert says in str(known)


def test_a_module_of_ours_that_is_missing_is_a_bug():
    assert absent(ModuleNotFoundError("No module named 'x'", name="farflock.x")) is None
    assert absent(ModuleNotFoundError("without a name")) is None
