"""The script that made the shipped corpus is deterministic and strips what it says."""

import lzma

import msgspec
import pytest
from click.testing import CliRunner

from farflock.experiments.make_corpus import assemble, main, pack, plain, title_of

PLAY = (
    "# Two Kings\n\n## ACT I\n\n### SCENE I. A room.\n\n_Enter *KING*_\n\n**KING**  \n"
    "_\\[Aside]_  \nHow now\\--what?  \n\n\n\nNothing.\n"
)


@pytest.fixture
def plays(tmp_path):
    folder = tmp_path / "plays" / "comedies"
    folder.mkdir(parents=True)
    (folder / "two-kings.md").write_text(PLAY)
    (folder / "macbeth.md").write_text("## ACT I\n\n**WITCH**  \nWhen?\n")
    return folder.parent


def test_marks_go_and_words_stay():
    expected = (
        "Two Kings\n\nACT I\n\nSCENE I. A room.\n\nEnter KING\n\n"
        "KING\n[Aside]\nHow now--what?\n\nNothing.\n"
    )
    assert plain(PLAY) == expected


def test_a_play_without_a_heading_is_named_after_its_file():
    assert title_of("two-kings", PLAY) == "Two Kings"
    assert title_of("measure-for-measure", "## ACT I\n") == "Measure For Measure"


def test_plays_are_sorted_counted_and_some_held_out(plays):
    text, about = assemble(plays)
    assert [play["title"] for play in about["plays"]] == ["Macbeth", "Two Kings"]
    assert [play["held_out"] for play in about["plays"]] == [True, False]
    first = about["plays"][0]["size_bytes"]
    assert text[:first] == b"Macbeth\n\nACT I\n\nWITCH\nWhen?\n\n\n"
    assert sum(play["size_bytes"] for play in about["plays"]) == about["size_bytes"] == len(text)


def test_the_command_writes_the_same_bytes_twice(plays, tmp_path):
    outputs = []
    for name in ("one", "two"):
        target = tmp_path / name
        target.mkdir()
        result = CliRunner().invoke(main, [str(plays), str(target)])
        assert result.exit_code == 0, result.output
        outputs.append({path.name: path.read_bytes() for path in target.iterdir()})
    assert outputs[0] == outputs[1]
    about = msgspec.json.decode(outputs[0]["shakespeare.json"])
    assert lzma.decompress(outputs[0]["shakespeare.txt.xz"]) == assemble(plays)[0]
    assert about["sha256"] in result.output
    assert lzma.decompress(pack(b"x")) == b"x"
