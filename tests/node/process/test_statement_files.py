"""A node takes in what commands left in its folder, and keeps what it knows for its next start."""

import logging
from types import SimpleNamespace

from farflock.node.process.statement_files import StatementFiles, StatementKeeper
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity
from farflock.swarm.statements import StatementLog, seal

RUN = "ab" * 16
FOUNDER, BAD = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))


class Statements:
    """What a peer does with statements, without any other peer."""

    def __init__(self):
        self.log = StatementLog(RUN, (FOUNDER.peer,))

    def take(self, blobs):
        for blob in blobs:
            self.log.add(blob)


def keeper_in(folder):
    statements = Statements()
    admission = SimpleNamespace(statements=statements)
    membership = SimpleNamespace(admission=admission)
    peer = SimpleNamespace(terms=SimpleNamespace(run=RUN), membership=membership)
    return StatementKeeper(RunFolder(folder), peer), statements.log


def ordered(folder, kind, *rest):
    files, log = StatementFiles(RunFolder(folder), RUN), StatementLog(RUN, (FOUNDER.peer,))
    for blob in files.read():
        log.add(blob)
    files.order(log, seal(FOUNDER, log.next(FOUNDER.peer, kind, *rest)))


def test_an_order_of_a_running_node_is_taken_in_and_said_and_a_restart_remembers_it(
    tmp_path, caplog
):
    keeper, log = keeper_in(tmp_path)
    keeper.look()
    with caplog.at_level(logging.WARNING):
        ordered(tmp_path, "ban", BAD.peer)
        keeper.look()
    assert log.orders.banned == {BAD.peer}
    assert f"the founder states, 1: ban {BAD.peer}" in caplog.text
    (tmp_path / "orders.json").unlink()
    again, log = keeper_in(tmp_path)
    again.look()
    assert log.orders.banned == {BAD.peer}


def test_an_order_that_was_left_while_no_node_ran_is_taken_in_at_the_start(tmp_path):
    ordered(tmp_path, "close")
    ordered(tmp_path, "ban", BAD.peer)
    keeper, log = keeper_in(tmp_path)
    keeper.look()
    assert (log.orders.closed, log.orders.banned) == (True, {BAD.peer})


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path, caplog, monkeypatch):
    ordered(tmp_path, "close")
    keeper, log = keeper_in(tmp_path)
    (tmp_path / "statements.json").mkdir()
    (tmp_path / "statements.json" / "in the way").touch()
    keeper.look()
    assert log.orders.closed
    assert "cannot be kept" in caplog.text
