"""docs/limits.md names every limit of the program, with the value that the code has."""

import ast
import importlib
import math
import operator
import re
from functools import reduce
from pathlib import Path

import pytest
from tidy import measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text()
FOLDERS = ("node", "swarm", "optimizers", "compression")
# Simulators, the demo and the methods' test bench limit nothing that a run does.
LEFT_OUT = ("node/simulate/", "node/demo/", "swarm/sim/", "optimizers/testing/")
LIMIT = re.compile(r"(?:MAX|MIN)_\w+|(?:\w+_)?TIMEOUT_S")
NAME = r"`[a-z]\w*(?:\.\w+)+(?:\[\w+\])?`"
NAMES = re.compile(rf"{NAME}(?: × {NAME})*")
NUMBER = re.compile(r"(0x[0-9a-f]+|2\^-?\d+|[\d,]+(?:\.\d+)?(?:e-?\d+)?)(?: (\S+))?")
UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "ms": 0.001,
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 24 * 3600,
}
COUNTED = re.compile(
    "addresses|askers|bits|bundles|callers|calls|cells|changes|characters|checkpoints|chunks"
    "|codecs|connections|copies|descriptors|dials|doublings|heads|items|keys|lives|members"
    "|microbatches|offers|parameters|partners|passes|paths|payloads|peers|rounds|samples"
    "|sequences|shards|sockets|stages|steps|values|versions|views"
)


def value(text):
    """Return the value that a cell states; `2 to 64` and `8 MiB and 32 MiB` are tuples."""
    if " to " in text or " and " in text:
        return tuple(map(value, re.split(" to | and ", text)))
    found = NUMBER.fullmatch(text)
    assert found, f"{text!r} is not a value"
    number, unit = found[1].replace(",", ""), found[2]
    assert unit is None or unit in UNITS or COUNTED.fullmatch(unit), f"{unit!r} is not a unit"
    if number.startswith("0x"):
        base = int(number, 16)
    elif number.startswith("2^"):
        base = 2.0 ** int(number[2:])
    else:
        base = float(number) if re.search("[.e]", number) else int(number)
    return base / 1000 if unit == "ms" else base * UNITS.get(unit, 1)


def rows(page):
    """Yield the names and the value of each table's rows; every row must have both."""
    for line in page.splitlines():
        if not line.startswith("|") or re.match(r"\| ?-|\| (?:limit|what) \|", line):
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        places = [place for place, cell in enumerate(cells) if NAMES.fullmatch(cell)]
        assert places, f"a row without a limit: {line}"
        assert len(cells) == places[0] + 3, f"not a row of limits: {line}"
        assert all(cells), f"an empty cell: {line}"
        yield tuple(re.findall(r"`(.+?)`", cells[places[0]])), cells[places[0] + 1]


def actual(name):
    """Return the value of `folder.module.NAME`, or of `folder.module.NAME[key]`."""
    path, _, key = name.removesuffix("]").partition("[")
    module, _, constant = path.rpartition(".")
    found = getattr(importlib.import_module(f"farflock.{module}"), constant)
    return found[int(key) if key.isdigit() else key] if key else found


def wanted():
    """Yield the names of all public constants that limit something."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.as_posix().startswith(LEFT_OUT):
            continue
        for statement in measure.parsed(path).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else ()
            if isinstance(statement, ast.AnnAssign):
                targets = (statement.target,)
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and LIMIT.fullmatch(part.id):
                        name = ".".join((*place.with_suffix("").parts, part.id))
                        keys = getattr(actual(name), "keys", tuple)()
                        yield from [f"{name}[{key}]" for key in keys] or [name]


def faults(page, required):
    """Return all that is wrong with a page that has to name the `required` constants."""
    found, named = [], set()
    for names, stated in rows(page):
        named.update(names)
        try:
            is_right = value(stated) == reduce(operator.mul, map(actual, names))
        except (ImportError, AttributeError, KeyError) as error:
            found.append(f"{' × '.join(names)} does not exist: {error}")
            continue
        if not is_right:
            found.append(f"{' × '.join(names)} is not {stated}")
    return found + [f"{name} is missing" for name in required if name not in named]


def test_the_page_names_every_limit_with_its_value():
    required = list(wanted())
    assert len(required) > 100
    assert not faults(PAGE, required)


ROW = "| `swarm.messages.MAX_MEMBERS` | 64 members | why |"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW.replace("64", "65"), "is not 65 members"),
        (ROW.replace("64 members", "64 KiB"), "is not 64 KiB"),
        (ROW.replace("MAX_MEMBERS", "MAX_MUMBLERS"), "does not exist"),
        (ROW.replace("messages", "massages"), "does not exist"),
        (ROW.replace("MEMBERS", "STAGES").replace("64", "1,024"), "MAX_MEMBERS is missing"),
        ("", "MAX_MEMBERS is missing"),
    ],
)
def test_a_wrong_row_a_missing_one_and_one_of_no_constant_are_found(row, said):
    required = ["swarm.messages.MAX_MEMBERS"]
    assert not faults(ROW, required)
    found = faults(row, required)
    assert [each for each in found if said in each]


@pytest.mark.parametrize(
    "row",
    [
        "| swarm.messages.MAX_MEMBERS | 64 | why |",
        "| `swarm.messages.MAX_MEMBERS` | 64 |",
        "| `swarm.messages.MAX_MEMBERS` | 64 |  |",
        "| `swarm.messages.MAX_MEMBERS` | 64 mumblers | why |",
        "| `swarm.messages.MAX_MEMBERS` | many | why |",
    ],
)
def test_a_row_that_cannot_be_checked_is_refused(row):
    with pytest.raises(AssertionError):
        faults(row, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("65,536", 65_536),
        ("260 KiB", 266_240),
        ("1.5 MiB", 1_572_864),
        ("2 min", 120.0),
        ("7 d", 604_800),
        ("1 ms", 0.001),
        ("2^100", 2.0**100),
        ("2^-126", 2.0**-126),
        ("1e-9", 1e-9),
        ("0x7e12", 0x7E12),
        ("2 to 65,536", (2, 65_536)),
        ("8 MiB and 32 MiB", (2**23, 2**25)),
    ],
)
def test_values_are_read_with_their_units(text, expected):
    assert value(text) == expected


def test_a_row_may_state_the_product_of_several_limits():
    names = "`swarm.messages.MAX_PAYLOAD_CHUNKS` × `swarm.messages.MAX_CHUNK_BYTES`"
    assert not faults(f"| payload | {names} | 64 MiB | why |", [])
    assert faults(f"| payload | {names} | 32 MiB | why |", [])
    assert math.prod((16, 4 << 20)) == value("64 MiB")
