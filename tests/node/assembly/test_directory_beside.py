"""A directory that opens beside a node: asked for, awaited, failed, closed, and opened again."""

import asyncio
from itertools import pairwise

import pytest

from farflock.node.assembly.directory_beside import (
    LONGEST_RETRY_S,
    RETRY_S,
    WATCH_S,
    DirectoryBeside,
)
from farflock.swarm.dht.files import PortTaken
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.sim.virtual_time import run_virtual

ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/x"


class Inner:
    """An open directory that remembers what it was told."""

    addresses = (ADDRESS,)

    def __init__(self):
        self.alive, self.announced, self.closed = True, [], 0
        self.why = ""

    async def trouble(self):
        return self.why

    async def announce(self, run, record):
        self.announced.append(record)
        return True

    async def publish_head(self, run, head):
        return True

    async def peers(self, run):
        return [b"record"]

    async def heads(self, run):
        return [b"head"]

    async def close(self):
        self.closed += 1


class Opening:
    """Opens a directory after a second, or raises what the test says."""

    def __init__(self):
        self.opened, self.errors, self.addresses, self.tried = [], [], [], []
        self.beside = DirectoryBeside(self, self.addresses.append)

    async def __call__(self):
        self.tried.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        if self.errors:
            raise self.errors.pop(0)
        self.opened.append(Inner())
        return self.opened[-1]


def beside(main):
    """Run `main` with a directory that nobody has asked yet."""

    async def whole():
        opening = Opening()
        await main(opening, opening.beside)
        await opening.beside.close()

    run_virtual(whole())


def test_it_is_opened_once_when_it_is_first_asked():
    async def main(opening, directory):
        await asyncio.sleep(100.0)
        assert (opening.opened, directory.addresses, directory.trouble()) == ([], (), "")
        said = await asyncio.gather(
            directory.announce("run", b"mine"),
            directory.peers("run"),
            directory.publish_head("run", b"head"),
            directory.heads("run"),
        )
        assert said == [True, [b"record"], True, [b"head"]]
        assert len(opening.opened) == 1
        assert opening.addresses == [directory.addresses] == [(ADDRESS,)]

    beside(main)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DirectoryUnreachable("no peer could be reached"), "no peer could be reached"),
        (PortTaken("another program uses it"), "another program uses it"),
        (
            ImportError("No module named 'hivemind'"),
            "cannot be opened (No module named 'hivemind')",
        ),
        (OSError(), "cannot be opened (OSError)"),
    ],
)
def test_one_that_cannot_be_opened_is_gone_without_and_tried_again(error, said):
    async def main(opening, directory):
        opening.errors.append(error)
        await directory.begin()
        assert said in directory.trouble()
        assert await directory.announce("run", b"mine") is False
        assert await directory.publish_head("run", b"head") is False
        assert await directory.peers("run") == []
        with pytest.raises(
            (DirectoryUnreachable, PortTaken), match=r"cannot be opened|no peer|uses"
        ):
            await directory.heads("run")
        await asyncio.sleep(RETRY_S)
        assert await directory.peers("run") == [b"record"]
        assert directory.trouble() == ""

    beside(main)


def test_one_that_has_died_is_closed_and_opened_again():
    async def main(opening, directory):
        await directory.begin()
        opening.opened[0].alive = False
        assert await directory.announce("run", b"mine")
        first, second = opening.opened
        assert (first.closed, second.closed) == (1, 0)
        assert (first.announced, second.announced) == ([], [b"mine"])

    beside(main)


def test_one_that_falls_silent_is_said_and_opened_again_although_nobody_asks(caplog):
    async def main(opening, directory):
        await directory.begin()
        opening.opened[0].why = "its sockets were removed"
        await asyncio.sleep(WATCH_S - 0.5)  # it took a second to open, and so it does again
        assert directory.trouble() == "its sockets were removed"
        assert directory.addresses == ()
        assert "opens it again: its sockets were removed" in caplog.text
        await asyncio.sleep(1.0)
        first, second = opening.opened
        assert (first.closed, second.closed) == (1, 0)
        assert (directory.trouble(), opening.addresses) == ("", [(ADDRESS,)] * 2)
        assert await directory.announce("run", b"mine")
        assert (first.announced, second.announced) == ([], [b"mine"])

    beside(main)


def test_a_look_that_fails_in_an_unknown_way_is_said_and_does_not_end_the_watch(caplog):
    async def main(opening, directory):
        await directory.begin()

        async def broken():
            raise ZeroDivisionError("nobody thought of this")

        opening.opened[0].trouble = broken
        await asyncio.sleep(WATCH_S + 2.0)
        assert "a look at it failed (nobody thought of this)" in caplog.text
        assert (len(opening.opened), directory.trouble()) == (2, "")
        opening.opened[1].why = "its sockets were removed"
        await asyncio.sleep(WATCH_S + 2.0)
        assert len(opening.opened) == 3

    beside(main)


def test_one_that_stays_away_is_tried_ever_more_rarely():
    async def main(opening, directory):
        opening.errors += [DirectoryUnreachable("nobody there")] * 100
        await directory.begin()
        await asyncio.sleep(1000.0)
        pauses = [after - before for before, after in pairwise(opening.tried)]
        assert pauses[0] <= 1.0 + RETRY_S + WATCH_S
        assert pauses == sorted(pauses)
        assert LONGEST_RETRY_S <= pauses[-1] <= 1.0 + LONGEST_RETRY_S + WATCH_S

    beside(main)


def test_who_has_no_time_to_wait_does_not_end_the_opening():
    async def main(opening, directory):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await directory.heads("run")
        await asyncio.sleep(1.0)
        assert directory.addresses == (ADDRESS,)

    beside(main)


def test_closing_it_ends_the_opening_and_calls_end_quietly():
    async def main(opening, directory):
        asking = asyncio.create_task(directory.peers("run"))
        await asyncio.sleep(0.5)
        await directory.close()
        assert await asking == []
        assert opening.opened == []
        assert await directory.announce("run", b"mine") is False
        assert await directory.heads("run") == []

    beside(main)


def test_closing_it_closes_what_is_open():
    async def main(opening, directory):
        await directory.begin()
        await directory.close()
        assert opening.opened[0].closed == 1

    beside(main)


def test_trouble_of_one_that_was_replaced_meanwhile_does_not_close_the_new_one():
    async def main(opening, directory):
        await directory.begin()
        first = opening.opened[0]

        async def slow_trouble():
            await asyncio.sleep(4.0)
            return "it has not answered"

        first.trouble = slow_trouble
        await asyncio.sleep(WATCH_S + 1.0)  # the watch has asked the first one
        first.alive = False
        assert await directory.announce("run", b"mine")
        await asyncio.sleep(2 * WATCH_S)
        assert (len(opening.opened), opening.opened[-1].closed) == (2, 0)
        assert directory.trouble() == ""

    beside(main)
