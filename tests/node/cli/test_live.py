"""The live view says which peers are there, how fast a node trains, how it reaches the others, and
which peers it waits for and for how long."""

import re
import sys

import msgspec
import pytest
from worlds.peers import node_status

from farflock.node.cli.live import LINE_EVERY_SHOWS, live, watching
from farflock.node.demo.demo import Child, Moment
from farflock.node.process.status import EvaluationStatus, PartnerStatus, Waiting

ME, OTHER, THIRD = (f"12D3KooW{name}" for name in ("memememe", "otherone", "thirdone"))
STATUS = node_status(
    pid=1,
    peer=ME,
    step=1200,
    tokens=500,
    total_tokens=1000,
    loss=3.14159,
    view=3,
    members=(ME, OTHER),
    partners=(PartnerStatus(OTHER, "suspect", "forwarded", 12.3),),
    waits=(Waiting("delta", 5, (OTHER,), 4.2),),
    sent_bytes=1_500_000,
    received_bytes=2_500_000,
    rounds={"ok": 4, "partial": 1},
    last_round=5,
    tokens_per_s=1234.5,
)
SAID = (
    "50% of 1.0k tokens",
    "training",
    "1,200",
    "3.142",
    "1,234 tokens/s",
    "5 (4 complete, 1 without some peers)",
    "2 members",
    "1.5 MB",
    "2.5 MB",
    "relayed",
    "waiting for otherone (delta, round 5, 4 s left)",
)
COLUMNS = 80


def test_without_a_terminal_a_node_is_one_line(capsys):
    with watching("farflock join") as show:
        show(STATUS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("farflock join: ")
    for word in (*SAID, "step 1,200", "loss 3.142", "sent 1.5 MB"):
        assert word in line


def test_the_newest_evaluation_is_shown(terminal):
    evaluation = EvaluationStatus(4, OTHER, 2.5, 0.125, 3.25, 400)
    look = terminal()
    with watching("t") as show:
        show(msgspec.structs.replace(STATUS, evaluation=evaluation))
    assert "2.500 ± 0.125 nats a token, 3.250 bits a byte" in look()


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
            "t: thirdone joined",
            "t: otherone left",
        ]


def test_a_node_that_has_not_stepped_shows_no_loss_and_no_pace(capsys):
    early = msgspec.structs.replace(
        STATUS, loss=None, tokens_per_s=None, rounds={}, last_round=None, waits=()
    )
    with watching("t") as show:
        show(early)
    line = capsys.readouterr().err
    assert "None" not in line
    assert not any(word in line for word in ("loss", "tokens/s", "round", "waiting"))


@pytest.fixture
def terminal(monkeypatch, capsys):
    """A function that makes standard error a terminal, and returns one for the text shown since.

    The test itself calls it: capturing replaces the stream between a test and its fixtures."""

    def begin(columns=COLUMNS):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        return lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)

    return begin


def lines_of(shown):
    """The lines of what was shown; none may be wider than the terminal."""
    lines = shown.replace("\r", "\n").splitlines()
    assert all(len(line) <= COLUMNS for line in lines)
    return [line for line in lines if line.strip()]


ADMISSION = "trains, and waits to be admitted"


@pytest.mark.parametrize(
    ("fields", "view_s", "words"),
    [
        ({"doing": "trains"}, None, "training"),
        ({"doing": "serves stage 2"}, None, "serving stage 2"),
        ({"doing": "is leaving"}, None, "leaving"),
        ({"doing": "has ended"}, None, "ended"),
        ({"doing": "waits for members: 2 of 4 are here"}, None, "waiting for members: 2 of 4"),
        ({"doing": ADMISSION, "loss": None}, 30.0, "waiting to be admitted, up to 30 s"),
        ({"doing": ADMISSION, "loss": None}, None, "waiting to be admitted"),
        (
            {"doing": ADMISSION},
            30.0,
            "training; will be counted from the next membership change, up to 30 s",
        ),
        (
            {"doing": "serves stage 1, and waits to be admitted"},
            None,
            "serving stage 1; will be counted from the next membership change",
        ),
    ],
)
def test_each_state_has_plain_words_on_a_terminal_and_in_lines(
    terminal, capsys, fields, view_s, words
):
    status = msgspec.structs.replace(STATUS, **fields)
    with watching("t") as show:
        show(status, view_s)
    assert f"  {words}" in capsys.readouterr().err
    look = terminal()
    with watching("t") as show:
        show(status, view_s)
    assert any(line.strip().startswith(words) for line in lines_of(look()))


def test_a_round_without_a_partner_is_said_until_one_has_a_partner(capsys):
    with watching("t") as show:
        for tokens, rounds in ((500, {"alone": 1}), (600, {"alone": 1, "ok": 1})):
            show(msgspec.structs.replace(STATUS, tokens=tokens, rounds=rounds))
    alone, paired = capsys.readouterr().err.splitlines()
    assert "training; no partner this round" in alone
    assert "(1 without a partner)" in alone
    assert "no partner this round" not in paired


@pytest.mark.parametrize(
    ("life", "road", "words"),
    [
        ("alive", "direct", ("answering", "direct")),
        ("suspect", "forwarded", ("not answering", "relayed")),
        ("dead", "libp2p", ("gone", "relayed by libp2p")),
        ("unknown", "none", ("not contacted yet", "no connection")),
    ],
)
def test_each_partner_has_plain_words_for_whether_and_how_it_is_reached(
    terminal, life, road, words
):
    look = terminal()
    with watching("t") as show:
        show(msgspec.structs.replace(STATUS, partners=(PartnerStatus(OTHER, life, road, 1.0),)))
    (row,) = {line for line in lines_of(look()) if "otherone" in line and "waiting" not in line}
    assert all(word in row for word in words)


def test_labels_stand_once(terminal):
    look = terminal()
    with watching("t") as show:
        show(STATUS)
    shown = lines_of(look())
    for label in ("step", "loss", "round", "sent", "received"):
        (line,) = {line for line in shown if line.split()[0] == label}
        assert line.count(label) == 1


def test_a_lone_member_is_not_several(capsys):
    with watching("t") as show:
        show(msgspec.structs.replace(STATUS, members=(ME,)))
    assert "run 1 member  " in capsys.readouterr().err


def test_a_huge_run_and_long_waits_fit_the_terminal_too(terminal):
    others = tuple(f"12D3KooW{number:08}" for number in range(20))
    partners = tuple(PartnerStatus(peer, "alive", "direct", 12345.0, "stage:3") for peer in others)
    waits = (Waiting("delta", 5, others, 4.2),)
    huge = {"step": 10**9, "tokens": 10**12, "total_tokens": 10**14, "sent_bytes": 10**15}
    look = terminal()
    with watching("farflock join") as show:
        show(msgspec.structs.replace(STATUS, partners=partners, waits=waits, **huge))
    assert "1% of 100.0T tokens" in "\n".join(lines_of(look()))


def test_on_a_terminal_a_node_is_a_table_with_its_partners(terminal):
    look = terminal()
    with watching("farflock join") as show:
        assert look() == ""  # until there is something to show, the screen is left alone
        show(STATUS)
    shown = look()
    assert len(lines_of(shown)) > 8
    for word in (*SAID, "latency", "not answering", "12 ms"):
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
        "frozen",
        "killed",
        "starting",
        "founder is waiting for peer 1 (delta, round 5, 4 s left)",
        "50% of the run's tokens",
        "2 members",
        "1,234",
    ):
        assert word in shown
    assert "peer 2 was killed (SIGKILL)" in shown
    assert len(lines_of(shown)) > 6


def test_without_a_terminal_a_demo_is_news_and_a_line_for_each_twentieth(capsys, tmp_path):
    children = (child(tmp_path, "founder", STATUS),)
    with live("d") as show:
        for share in (0.0, 0.01, 0.04, 0.051, 0.06):
            show(Moment(children, share, ("x happened",) if share > 0.03 else ()))
    assert capsys.readouterr().err.splitlines() == [
        "d:   0%  loss: founder 3.142",
        "d: x happened",
        "d:   5%  loss: founder 3.142",
    ]


def test_a_late_round_is_said_to_be_late(capsys):
    with watching("t") as show:
        show(msgspec.structs.replace(STATUS, waits=(Waiting("delta", 5, (), -7.6),)))
    assert (
        "waiting for the decision (delta, round 5, 8 s late; training continues)"
        in capsys.readouterr().err
    )
