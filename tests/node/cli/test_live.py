"""The live view says of a node who is there, how fast, over which road, and who is waited for and for how long."""

import sys

import msgspec
import pytest

from farflock.node.cli.live import LINE_EVERY_SHOWS, live, watching
from farflock.node.demo.demo import Child, Moment
from farflock.node.process.status import PartnerStatus, Status, Waiting

ME, OTHER, THIRD = (f"12D3KooW{name}" for name in ("memememe", "otherone", "thirdone"))
STATUS = Status(
    pid=1,
    run="ab" * 16,
    peer=ME,
    invite="farflock:x",
    step=1200,
    tokens=500,
    total_tokens=1000,
    loss=3.14159,
    view=3,
    members=(ME, OTHER),
    is_member=True,
    partners=(PartnerStatus(OTHER, "suspect", "forwarded", 12.3),),
    waits=(Waiting("delta", 5, (OTHER,), 4.2),),
    sent_bytes=1_500_000,
    received_bytes=2_500_000,
    unsure_rounds=0,
    dropped={},
    rounds={"ok": 4, "partial": 1},
    last_round=5,
    tokens_per_s=1234.5,
)
SAID = (
    "50%",
    "trains",
    "step 1,200",
    "loss 3.142",
    "1,234 tokens/s",
    "round 5 (4 ok, 1 partial)",
    "2 members",
)
SAID += ("sent 1.5 MB, received 2.5 MB", "forwarded", "otherone (delta, round 5, 4 s left)")


def test_without_a_terminal_a_node_is_one_line(capsys):
    with watching("farflock join") as show:
        show(STATUS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("farflock join: ")
    for word in SAID:
        assert word in line


def test_lines_come_with_progress_with_news_and_now_and_then(capsys):
    with watching("t") as show:
        for _ in range(LINE_EVERY_SHOWS):
            show(STATUS)
        assert len(capsys.readouterr().err.splitlines()) == 1
        show(STATUS)
        assert len(capsys.readouterr().err.splitlines()) == 1
        show(msgspec.structs.replace(STATUS, tokens=551))
        assert len(capsys.readouterr().err.splitlines()) == 1
        show(msgspec.structs.replace(STATUS, tokens=551, members=(ME, THIRD), view=4))
        assert capsys.readouterr().err.splitlines() == [
            "t: thirdone is in from view 4 on",
            "t: otherone is out from view 4 on",
        ]


def test_a_node_that_has_not_stepped_shows_no_loss_and_no_pace(capsys):
    early = msgspec.structs.replace(
        STATUS, loss=None, tokens_per_s=None, rounds={}, last_round=None, waits=()
    )
    with watching("t") as show:
        show(early)
    line = capsys.readouterr().err
    assert "None" not in line
    assert not any(word in line for word in ("loss", "tokens/s", "round", "waits"))


@pytest.fixture
def terminal(monkeypatch, capsys):
    """A function that makes standard error a terminal (in the test itself: capturing replaces the stream between a test and
    its fixtures), and gives one for what was shown since the last time."""

    def begin():
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        return lambda: capsys.readouterr().err

    return begin


def test_on_a_terminal_a_node_is_a_table_with_its_partners(terminal):
    look = terminal()
    with watching("farflock join") as show:
        assert look() == ""  # until there is something to show, the screen is left alone
        show(STATUS)
    shown = look()
    for word in (*SAID, "round trip", "suspect", "12 ms"):
        assert word in shown


def test_what_peers_are_called_is_never_read_as_markup(terminal):
    look = terminal()
    with watching("t") as show:
        show(
            msgspec.structs.replace(
                STATUS, partners=(PartnerStatus("x[bold]", "alive", "[red]", None),)
            )
        )
    shown = look()
    assert "[red]" in shown
    assert "[bold]" in shown


class Process:
    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


def child(folder, name, status=None, code=None, **marks):
    place = folder / name
    place.mkdir()
    if status is not None:
        (place / "status.json").write_bytes(msgspec.json.encode(status))
    return Child(name, place, Process(code), **marks)


def test_a_demo_is_a_row_for_each_peer_with_the_names_that_the_demo_gave_them(terminal, tmp_path):
    other = msgspec.structs.replace(STATUS, peer=OTHER, waits=())
    children = (
        child(tmp_path, "founder", STATUS),
        child(tmp_path, "peer 1", other, stopped=True),
        child(tmp_path, "peer 2", killed=True, code=-9),
        child(tmp_path, "newcomer"),
    )
    look = terminal()
    with live("farflock demo") as show:
        show(Moment(children, 0.5, ("peer 2 was killed (SIGKILL)",)))
    shown = look()
    for word in (
        "founder",
        "training",
        "stopped",
        "killed",
        "starting",
        "peer 1 (delta, round 5, 4 s left)",
        "1,234",
    ):
        assert word in shown
    assert "peer 2 was killed (SIGKILL)" in shown


def test_without_a_terminal_a_demo_is_news_and_a_line_for_each_twentieth(capsys, tmp_path):
    children = (child(tmp_path, "founder", STATUS),)
    with live("d") as show:
        for share in (0.0, 0.01, 0.04, 0.051, 0.06):
            show(Moment(children, share, ("x happened",) if share > 0.03 else ()))
    assert capsys.readouterr().err.splitlines() == [
        "d:   0%  loss of each peer 3.142",
        "d: x happened",
        "d:   5%  loss of each peer 3.142",
    ]


def test_a_late_round_is_said_to_be_late(capsys):
    with watching("t") as show:
        show(msgspec.structs.replace(STATUS, waits=(Waiting("delta", 5, (), -7.6),)))
    assert (
        "waits for the decision (delta, round 5, 8 s late; training continues)"
        in capsys.readouterr().err
    )
