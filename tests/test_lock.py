"""The lock files name what a peer needs, each in the version that was tested, with hashes."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = ("hf", "quantized")
LOCKS = ("requirements.lock", "requirements-build.lock")
ENTRY = re.compile(r"([\w.-]+)==([\w.]+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)")
# torch names the versions of its parts; httpx2-jsfetch is for a platform that nobody tests;
# setuptools builds packages and is needed by some.
UNPINNED = re.compile(r"(nvidia|cuda)-[\w-]+|triton|setuptools|httpx2-jsfetch")


def entries(name):
    """Version and hashes of each package of a lock file; fail on a line that is part of none."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M)
    assert not ENTRY.sub("", text).strip()
    return {
        canonicalize_name(entry[1]): (entry[2], frozenset(re.findall(r"sha256:(\w+)", entry[3])))
        for entry in ENTRY.finditer(text)
    }


def pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in pairs}


def named():
    """The requirements that pyproject.toml states of a peer and of building it."""
    project = CONFIG["project"]
    texts = [*project["dependencies"], *CONFIG["build-system"]["requires"]]
    texts += [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in texts]


def installed_needs():
    """The names of what a peer needs here, and what that needs, and so on."""
    found, left = set(), named()
    while left:
        need = left.pop()
        wanted = {(canonicalize_name(need.name), extra) for extra in ("", *need.extras)} - found
        found |= wanted
        for package, extra in wanted:
            texts = importlib.metadata.requires(package) or ()
            needs = [Requirement(text) for text in texts]
            left += [
                one for one in needs if not one.marker or one.marker.evaluate({"extra": extra})
            ]
    return {package for package, _ in found}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_no_other_file_is_allowed(name):
    assert all(hashes for _, hashes in entries(name).values())
    assert "://" not in (ROOT / name).read_text()  # an index is the reader's own choice


def test_the_lock_has_the_versions_that_were_tested():
    versions = {package: version for package, (version, _) in entries("requirements.lock").items()}
    tested = pinned()
    assert {name: tested[name] for name in versions if name in tested} == {
        name: version for name, version in versions.items() if not UNPINNED.fullmatch(name)
    }


def test_the_lock_satisfies_what_the_package_needs():
    locked = entries("requirements.lock")
    assert not [
        str(need)
        for need in named()
        if locked[canonicalize_name(need.name)][0] not in need.specifier
    ]


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "bitsandbytes")),
    reason="pip install -e '.[hf,quantized]'",
)
def test_the_lock_names_all_that_those_packages_need():
    assert installed_needs() <= entries("requirements.lock").keys()


def test_what_builds_the_packages_has_the_same_hashes_in_both_locks():
    building = entries("requirements-build.lock")
    assert building.keys() == {"setuptools"}
    assert building.items() <= entries("requirements.lock").items()


def test_no_command_of_the_installation_by_hash_fetches_a_file_without_one():
    page = (ROOT / "docs" / "tutorials" / "volunteer.md").read_text()
    section = page.partition("## Install by hash")[2]
    commands = re.findall(r"^\.venv/bin/pip install (.*)$", section, re.M)
    assert re.findall(r"-r (\S+)", " ".join(commands)) == list(reversed(LOCKS))
    for command in commands:
        assert "--require-hashes" in command or command == "--no-deps --no-build-isolation -e ."
        assert "--no-build-isolation" in command or command.endswith(LOCKS[1])
