"""The pages of docs/ that describe the code: diagrams, files and rooms are those of the code."""

import re
import tomllib
from pathlib import Path

import pytest

from farflock.swarm.protocol.decide import PROPOSER_TABLE
from farflock.swarm.protocol.exchange.closing import CLOSING_TABLES
from farflock.swarm.protocol.exchange.mean import SHARD_TABLE
from farflock.swarm.protocol.pair import PAIR_TABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLES = {
    "CLOSING_TABLES, contributor": CLOSING_TABLES["contributor"],
    "CLOSING_TABLES, voter": CLOSING_TABLES["voter"],
    "SHARD_TABLE": SHARD_TABLE,
    "PROPOSER_TABLE": PROPOSER_TABLE,
    "PAIR_TABLES, leader": PAIR_TABLES["leader"],
}
DESCRIBING = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")


def diagrams():
    """Transitions of each state diagram, by the table that its first line names."""
    for text in re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE, re.S):
        name = re.search(r"%% (.+)", text)[1]
        yield name, set(re.findall(r"^ +(\w+) --> (\w+): (\w+)$", text, re.M))


@pytest.mark.parametrize("name", TABLES)
def test_each_state_diagram_has_exactly_the_transitions_of_its_table(name):
    drawn = dict(diagrams())
    assert drawn[name] == {(state, to, event) for (state, event), to in TABLES[name].items()}
    assert drawn.keys() == TABLES.keys()


def test_the_map_shows_the_rooms_in_the_order_of_their_imports():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rooms = {one["name"]: one["layers"] for one in contracts["contracts"] if "layers" in one}
    height = {
        room.strip(): -place
        for place, layer in enumerate(rooms["the rooms of node, highest first"])
        for room in layer.split("|")
    }
    inside = PAGE.partition("subgraph node\n")[2].partition("\n    end")[0]
    drawn = re.findall(r"^ +(\w+)(?:\[.+?\])? --> (\w+)", inside, re.M)
    assert {room for pair in drawn for room in pair} == height.keys() - {"errors", "reporting"}
    assert all(height[above] > height[below] for above, below in drawn)


@pytest.mark.parametrize("page", DESCRIBING)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(
        r"`((?:node|swarm|optimizers|compression|experiments|tests|examples)/[\w/.-]+\.\w+)`", text
    )
    places = (ROOT, ROOT / "tests")  # a list of tests leaves that folder out
    assert not [name for name in named if not any((place / name).exists() for place in places)]


def test_the_readme_is_one_that_is_read():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]
