"""The installed package is the code in this checkout, and the standard library stays visible."""

import re
import runpy
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from worlds.waiting import completed

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
PROJECT = CONFIG["project"]
LINKS = ("node", "swarm", "optimizers", "compression", "experiments", "examples")


def run(*command, cwd, **options):
    return completed(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        **options,
    )


def test_every_folder_with_code_is_packaged():
    found = {
        ".".join(("farflock", *path.parent.relative_to(ROOT).parts))
        for folder in LINKS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found | {"farflock"} == set(SETUPTOOLS["packages"])


def test_each_package_maps_to_its_folder():
    for package, folder in SETUPTOOLS["package-dir"].items():
        expected = (
            "farflock"
            if package == "farflock"
            else package.removeprefix("farflock.").replace(".", "/")
        )
        assert folder == expected
        assert (ROOT / folder).is_dir()


def test_compression_has_no_init_file():
    assert not (ROOT / "compression" / "__init__.py").exists()


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("folder", LINKS)
def test_the_front_door_links_to_each_folder(folder):
    link = ROOT / "farflock" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", ["farflock", *LINKS])
def test_each_folder_says_that_it_is_typed(folder):
    assert (ROOT / folder / "py.typed").exists()


@pytest.mark.net
def test_a_standard_library_package_called_compression_stays_visible_from_the_checkout(tmp_path):
    """In 3.14 `gzip` imports a package `compression` from behind the checkout on the path."""
    package = tmp_path / "stdlib" / "compression"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_common.py").write_text("MARK = 'the standard library'\n")
    code = (
        f"import sys; sys.path.append({str(package.parent)!r}); "
        "from compression._common import MARK; sys.stdout.write(MARK)"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout == "the standard library"


def test_pinned_versions_cover_what_the_package_needs():
    pinned = {
        re.split(r"[=<>]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *extras["dev"], *extras["docs"]]
    assert {re.split(r"[=<>]", need)[0].lower() for need in needed} <= pinned


def test_the_makefile_sets_up_what_the_constraints_pin_first():
    first = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert first.startswith("torch==")


def test_every_text_recipe_and_manifest_goes_into_the_wheel():
    listed = SETUPTOOLS["package-data"]
    patterns = [
        Path(SETUPTOOLS["package-dir"][package]) / pattern
        for package, of_package in listed.items()
        for pattern in of_package
        if package != "*"
    ]
    found = {
        path.relative_to(ROOT)
        for folder in LINKS
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix not in {".py", ".pyc", ".so", ".typed", ".c", ".h"}
    }
    assert {"texts", "recipes", "runs"} <= {path.parent.name for path in found}
    assert not [path for path in found if not any(path.match(str(each)) for each in patterns)]


def test_the_metadata_names_the_authors_and_the_version_of_the_citation():
    cited = (ROOT / "CITATION.cff").read_text()
    (author,) = PROJECT["authors"]
    assert f'  - name: "{author["name"]}"\n' in cited
    assert f"\nversion: {PROJECT['version']}\n" in cited


def test_the_long_description_has_no_link_that_leads_nowhere_outside_the_repository():
    text = (ROOT / PROJECT["readme"]).read_text()
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text)


def test_the_long_description_begins_as_the_readme_does():
    text, readme = ((ROOT / name).read_text() for name in (PROJECT["readme"], "README.md"))
    assert text.split("\n\n")[:2] == readme.split("\n\n")[:2]


def test_the_examples_are_listed_with_their_paths(capsys):
    runpy.run_module("farflock.examples", run_name="__main__")
    listed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.exists() for path in listed)
    assert {"plain_loop.py", "pipeline.toml"} <= {path.name for path in listed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout; built from a copy without the links, which it must not need."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = [ROOT / name for name in ("pyproject.toml", "MANIFEST.in", "LICENSE")]
    files += [
        path
        for folder in LINKS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    files += [
        path for path in (ROOT / "farflock").iterdir() if path.is_file() and not path.is_symlink()
    ]
    for path in files:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", target, source, cwd=target)
    return next(target.glob("farflock-*.whl"))


@pytest.mark.long
@pytest.mark.net
def test_the_wheel_holds_every_module_and_every_text(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"farflock/{path.relative_to(ROOT)}"
        for folder in LINKS
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or {"texts", "recipes", "runs"} & set(path.parts[:-1])
    }
    assert wanted <= names
    assert not [
        name for name in names if name.startswith(("compression/", "node/", "swarm/", "tests/"))
    ]


@pytest.mark.long
@pytest.mark.net
def test_the_wheel_works_from_another_directory_without_the_checkout(wheel, tmp_path):
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "-q",
        "--target",
        tmp_path / "site",
        wheel,
        cwd=tmp_path,
    )
    code = (
        "import sys, farflock.compression.catalog\n"
        "import farflock.swarm.peer.peer, farflock.optimizers.catalog\n"
        "from farflock.testing import check_codec, check_method\n"
        "from farflock.node.model.corpus import load_corpus\n"
        "sys.stdout.write(f'{farflock.__file__} {len(load_corpus(\"shakespeare\").train)}')"
    )
    isolated = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(tmp_path / "site"),
        "HOME": str(tmp_path),
    }
    where, size = run(sys.executable, "-c", code, cwd=tmp_path, env=isolated).stdout.split()
    assert Path(where).is_relative_to(tmp_path)
    assert int(size) > 1_000_000
    shown = run(
        sys.executable, "-m", "farflock.node.cli", "--help", cwd=tmp_path, env=isolated
    ).stdout
    assert "generate" in shown
