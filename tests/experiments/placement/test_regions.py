"""The tables of real links: what is known of them from elsewhere comes out,
and a damaged table is refused with the place."""

from importlib.resources import files

import pytest

from farflock.experiments.placement import regions
from farflock.node.errors import Usage

SMALL = """
[here]
source = "nobody"
names = ["a", "b"]
latency_ms = [[1, 9], [9, 2]]
unit_bytes = 1000
bandwidth = [[5, 3], [3, 7]]
"""
MICROBATCH = 32 * 2**20  # bytes


def test_both_tables_are_there_with_their_sources():
    tables = regions.load()
    assert {name: len(table.names) for name, table in tables.items()} == {"gcp": 12, "aws": 10}
    assert "SkipPipe" in tables["gcp"].source
    assert "DT-FM" in tables["aws"].source


@pytest.mark.parametrize(
    ("a", "b", "seconds"),
    [
        ("Belgium", "Canada", 1.961552),
        ("Oregon", "Los Angeles", 0.626046),
        ("Japan", "Taiwan", 0.776519),
        ("Australia", "London", 3.806675),
        ("Germany", "Germany", 0.366625),
    ],
)
def test_transfers_take_as_long_as_skippipes_released_schedule_says(a, b, seconds):
    """Its schedule adds 0.35 s to each."""
    links = regions.load()["gcp"].links([a, b])
    assert links.latency_s[0, 1] + MICROBATCH / links.bandwidth[0, 1] + 0.35 == pytest.approx(
        seconds, abs=1e-6
    )


def test_the_one_mistake_of_the_source_is_there_if_asked_for():
    gcp = regions.load()["gcp"]
    pair = ["Netherlands", "London"]
    as_released, mended = gcp.links(pair, released=True), gcp.links(pair)
    assert as_released.latency_s[0, 1] + MICROBATCH / as_released.bandwidth[
        0, 1
    ] + 0.35 == pytest.approx(132.3136, abs=1e-4)
    assert mended.bandwidth[0, 1] == 0.2425 * 2**30


def test_amazons_are_gigabits():
    links = regions.load()["aws"].links(["Tokyo", "Ireland"])
    assert links.latency_s[0, 1] == 0.199
    assert links.bandwidth[1, 0] == pytest.approx(0.465e9 / 8)


def test_machines_of_one_region_are_as_near_as_its_diagonal_says():
    links = regions.read(SMALL)["here"].links(["a", "b", "b"])
    assert links.latency_s.tolist() == [[0, 0.009, 0.009], [0.009, 0, 0.002], [0.009, 0.002, 0]]
    assert links.bandwidth[1, 2] == 7000


def test_machines_take_the_regions_in_turns():
    assert regions.read(SMALL)["here"].turns(5) == ("a", "b", "a", "b", "a")


def test_the_worldwide_case_has_measurements():
    assert len(regions.load()["aws"].links(regions.WORLDWIDE)) == 8


def test_a_region_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(Usage, match="did you mean 'Oregon'"):
        regions.load()["aws"].links(["Oregan"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[9, 2]", "[8, 2]", "latency_ms from a to b is 9.0, but back it is 8.0"),
        ("[[5, 3], [3, 7]]", "[[5, 3]]", "bandwidth is not a table of 2 by 2"),
        ("[3, 7]", "[3]", "bandwidth is not a table of 2 by 2"),
        ("[5, 3], [3", "[5, 0], [0", "bandwidth from a to b is 0.0"),
        ("[5, 3]", "[nan, 3]", "bandwidth from a to a is nan"),
        ('"b"', '"a"', "named twice"),
        ("1000", "-1", "unit_bytes"),
        ("source", "sauce", "sauce"),
        ("[here]", "[here", "correct the file"),
        (
            "bandwidth = ",
            'released = [{ pair = ["a", "c"], bandwidth = 1 }]\nbandwidth = ',
            "is not a pair of its regions",
        ),
    ],
)
def test_a_damaged_table_is_refused_with_the_place(old, new, reason):
    assert old in SMALL
    with pytest.raises(Usage, match=reason):
        regions.read(SMALL.replace(old, new, 1))


def test_the_shipped_file_says_what_it_measures():
    assert (
        (files("farflock.experiments.placement") / regions.ORIGIN)
        .read_text()
        .startswith("# Measured links")
    )
