"""A partner that dies, or does its worst, must not end a healthy process whose loop is busy.

libzmq aborts a process if a connection ends while libzmq has stopped reading it, and a heartbeat
follows (decision 024).
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from worlds.fleet import run
from worlds.waiting import line_of

from farflock.swarm.record import Record, seal, unseal

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
# Holds its loop up for 0.8 s at a time, as a loaded machine does, and receives what there is.
VICTIM = """
import asyncio, random, time
from farflock.swarm.identity import Identity
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

async def receive(links):
    while True:
        await links.receive()

async def main():
    identity = Identity.from_seed(bytes([1]) * 32)
    links = await ZmqLinks.open(identity, "run", LinkOptions(incarnation=1, sequence=1))
    print(links.record().hex(), flush=True)
    receiving = asyncio.create_task(receive(links))
    random.seed(1)
    while True:
        await asyncio.sleep(random.uniform(0, 0.2))
        time.sleep(0.8)
        print("lives", len(links.table.partners), flush=True)

asyncio.run(main())
"""
# Sends bulk as fast as it is taken.
PARTNER = """
import asyncio, sys
from farflock.swarm.identity import Identity
from farflock.swarm.record import unseal
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

async def main():
    seed, number, record = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    identity = Identity.from_seed(bytes([seed]) * 32)
    options = LinkOptions(incarnation=number, sequence=100 + number)
    links = await ZmqLinks.open(identity, "run", options)
    victim = unseal(record, "run").peer
    links.learn(record)
    while not links.send(victim, bytes(100)):
        await asyncio.sleep(0.02)
    await links.send_bulk(victim, bytes(500), 60.0)
    print("sends", flush=True)
    while True:
        await links.send_bulk(victim, bytes(500), 60.0)

asyncio.run(main())
"""


@pytest.fixture
def child():
    """Start processes that end with the test."""
    children = []

    def start(code: str, *arguments: object) -> subprocess.Popen:
        command = (sys.executable, "-c", code, *map(str, arguments))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        children.append(process)
        return process

    yield start
    for process in children:
        process.kill()
        process.communicate()


async def beats(victim: subprocess.Popen, count: int) -> None:
    """Wait for signs of life; fail if the victim has ended."""
    for _ in range(count):
        line = await asyncio.to_thread(victim.stdout.readline)
        assert line, f"the victim ended with {victim.wait()}"


async def outlives(child, deaths: int) -> None:
    chance = random.Random(2)
    victim = child(VICTIM)
    record = (await asyncio.to_thread(victim.stdout.readline)).strip()
    for number in range(1, deaths + 1):
        partner = child(PARTNER, 10 + number % 5, number, record)
        await asyncio.to_thread(line_of, partner, "a partner's first frame")
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        partner.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.7)
        partner.kill()  # its kernel answers with a reset
        await beats(victim, 2)
    await beats(victim, 2)


def test_two_partners_that_freeze_and_die_while_they_send_do_not_end_a_busy_peer(child):
    asyncio.run(outlives(child, 2))


@pytest.mark.long
def test_fifteen_partners_that_freeze_and_die_do_not_end_a_busy_peer(child):
    asyncio.run(outlives(child, 15))


def greeting(guest) -> bytes:
    return b"\x01" + seal(guest.owner, Record("run", guest.owner.peer, 1, 1, guest.curve))


class Victim:
    """What `Fleet.stranger` needs to know of the peer that it calls."""

    def __init__(self, record: str) -> None:
        self.blob = bytes.fromhex(record)
        self.me = unseal(self.blob, "run").peer

    def record(self) -> bytes:
        return self.blob


@pytest.mark.parametrize("proven", [True, False])
def test_a_hostile_client_that_pings_amid_a_flood_and_goes_does_not_end_a_busy_peer(child, proven):
    """A ping in what libzmq had read and not passed on ends a process even without a timer."""

    async def main(fleet):
        process = child(VICTIM)
        victim = Victim((await asyncio.to_thread(process.stdout.readline)).strip())
        for seed in range(20, 23):
            guest = fleet.stranger(victim, seed, lane=1, heartbeat_ivl=1)
            if proven:
                await guest.say(greeting(guest))
            await asyncio.sleep(0.2)  # the victim is busy again, once the handshake is over
            for _ in range(3000):
                with contextlib.suppress(zmq.Again):
                    await guest.say(b"\x02x")
            await asyncio.sleep(0.3)
            guest.close()
            await beats(process, 2)

    run(main)
