"""Every applied round leaves an event and a receipt; all receipts' bytes add up to the links'."""

import pytest

from farflock.node.state.history import History
from farflock.node.state.run_log import RunRecorder


class Links:
    def __init__(self):
        self.sent, self.received = 100, 50  # what was exchanged before there was a journal

    def total_bytes(self):
        return self.sent, self.received


def round_of(number, status="ok", who=("a", "b")):
    fields = {"stream": "delta", "round": number, "status": status, "peers": len(who)}
    return {**fields, "participants": list(who), "tokens": 64 * number}


@pytest.fixture
def history(tmp_path):
    with History.open(tmp_path, lambda: 5.0) as made:
        yield made


def test_a_round_is_an_event_in_short_and_a_receipt_in_full(history):
    links = Links()
    journal = RunRecorder(history, links.total_bytes)
    links.sent, links.received = 130, 70
    journal.report("round", round_of(4))
    (event,) = history.events()
    assert event == {
        "time_s": 5.0,
        "kind": "round",
        "stream": "delta",
        "round": 4,
        "status": "ok",
        "peers": 2,
    }
    (receipt,) = history.receipts()
    assert receipt == {
        "time_s": 5.0,
        "stream": "delta",
        "round": 4,
        "status": "ok",
        "participants": ["a", "b"],
        "tokens": 256,
        "sent_bytes": 30,
        "received_bytes": 20,
    }


def test_receipts_add_up_and_rounds_are_counted_by_status(history):
    links = Links()
    journal = RunRecorder(history, links.total_bytes)
    assert (journal.rounds, journal.last_round) == ({}, None)
    for number, status in enumerate(["ok", "partial", "ok", "failed"]):
        links.sent += 10 * number
        links.received += 7
        journal.report("round", round_of(number, status))
    assert journal.rounds == {"ok": 2, "partial": 1, "failed": 1}
    assert journal.last_round == 3
    assert sum(entry["sent_bytes"] for entry in history.receipts()) == links.sent - 100
    assert sum(entry["received_bytes"] for entry in history.receipts()) == links.received - 50


def test_a_round_of_the_largest_group_fits_a_line(history):
    journal = RunRecorder(history, Links().total_bytes)
    journal.report(
        "round", round_of(1, who=[f"12D3KooW{'x' * 42}{number:02}" for number in range(64)])
    )
    assert len(history.receipts()[0]["participants"]) == 64


def test_steps_are_numbers_and_whatever_else_happens_is_an_event(history):
    journal = RunRecorder(history, Links().total_bytes)
    journal.report("step", {"step": 3, "loss": 2.5})
    journal.report("adopt", {"reason": "too far behind"})
    history.flush()
    assert history.last() == {"loss": (3, 2.5)}
    assert [(event["kind"], event["reason"]) for event in history.events()] == [
        ("adopt", "too far behind")
    ]
    assert history.receipts() == []


def test_what_cannot_be_written_is_said_once_and_ends_nothing(history, tmp_path, caplog):
    links = Links()
    journal = RunRecorder(history, links.total_bytes)
    blocked = tmp_path / "events.jsonl"
    blocked.mkdir()
    for number in range(3):
        links.sent += 10
        journal.report("round", round_of(number))
        journal.report("adopt", {"reason": "behind"})
    assert journal.rounds == {"ok": 3}
    (said,) = caplog.messages
    assert str(tmp_path) in said
    blocked.rmdir()
    journal.report("round", round_of(3))
    assert [event["round"] for event in history.events()] == [3]
    # nothing that was sent is lost from the books
    assert [entry["sent_bytes"] for entry in history.receipts()] == [30]


def test_an_evaluation_is_an_event_and_its_loss_a_metric_of_the_nodes_own_step(history):
    journal = RunRecorder(history, Links().total_bytes)
    fields = {"step": 7, "round": 20, "by": "a", "loss": 2.5, "standard_error": 0.1}
    journal.report("evaluation", fields)
    journal.report("evaluation", {**fields, "step": 9, "loss": None})
    assert [event["loss"] for event in history.events()] == [2.5, None]
    history.flush()
    assert history.last()["held_out"] == (7, 2.5)
