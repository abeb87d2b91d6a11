"""The directory between real processes: strangers that read it, and unplanned ends."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from worlds.waiting import alive, ended, in_time, line_of, until_real

pytest.importorskip("hivemind")

from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.dht.validator import cell_name, head_name
from farflock.swarm.identity import Identity
from farflock.swarm.record import Record, seal, unseal

pytestmark = pytest.mark.net

RUN = "run-1"

STRANGER = """
import json, sys, hivemind
dht = hivemind.DHT(initial_peers=sys.argv[1:2], start=True, client_mode=sys.argv[2] == "client",
                   use_relay=False, use_auto_relay=False, auto_nat=False, nat_port_map=False)
try:
    read = [None]
    while None in read:  # a peer that is slow to answer counts as one without the value
        read = [dht.get(key, latest=True) for key in sys.argv[3:]]
    print(json.dumps([
        {subkey.hex(): entry.value.hex() for subkey, entry in each.value.items()} for each in read
    ]))
finally:
    dht.shutdown()
"""

PEER = """
import asyncio, sys
from pathlib import Path
from farflock.swarm.dht.kademlia import DhtDirectory

async def main():
    directory = await DhtDirectory.open(Path(sys.argv[1]), run="run-1", initial_peers=sys.argv[2:])
    print(directory.daemon_pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""

_HANG = """
import psutil
from hivemind.p2p import p2p_daemon

async def never(**options):
    print(psutil.Process().children()[0].pid, flush=True)
    await asyncio.sleep(3600)

p2p_daemon.p2pclient.Client.create = never
"""
UNCONNECTED = PEER.replace("asyncio.run(main())", _HANG + "asyncio.run(main())")


def key_file(folder, number):
    identity, path = Identity.from_seed(bytes([number]) * 32), folder / f"key-{number}"
    identity.save(path)
    return identity, path


def record(identity):
    return seal(
        identity, Record(run=RUN, peer=identity.peer, incarnation=1, sequence=1, curve=bytes(32))
    )


async def stranger(address, mode, *keys):
    """The records that a program with hivemind alone reads: for each key, subkey to value."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STRANGER,
        address,
        mode,
        *keys,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = await in_time(process.communicate(), "what the stranger reads")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return [
        {bytes.fromhex(k): bytes.fromhex(v) for k, v in each.items()} for each in json.loads(output)
    ]


@pytest.mark.parametrize("mode", ["client", "member"])
def test_a_plain_hivemind_client_reads_the_head_and_the_records(tmp_path, mode):
    async def main():
        alice, path = key_file(tmp_path, 1)
        directory = await DhtDirectory.open(path, run=RUN)
        try:
            await directory.publish_head(RUN, b"the head")
            await directory.announce(RUN, record(alice))
            heads, records = await stranger(
                directory.addresses[0], mode, head_name(RUN), cell_name(RUN, 0)
            )
        finally:
            await directory.close()
        assert {subkey: value[64:] for subkey, value in heads.items()} == {
            alice.public: b"the head"
        }
        assert unseal(records[alice.public][64:], RUN).peer == alice.peer

    asyncio.run(main())


def await_end(pid):
    until_real(lambda: not alive(pid), f"the end of process {pid}")


@contextlib.contextmanager
def peer(folder, number, *peers, script=PEER):
    _, path = key_file(folder, number)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), *peers], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        ended(process, "the peer")
        process.stdout.close()


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_the_daemon_ends_with_its_process_however_that_ends(tmp_path, end):
    with peer(tmp_path, 1) as process:
        daemon = int(line_of(process, "the daemon's number"))
        assert alive(daemon)
        process.send_signal(end)
        ended(process, "the peer")
        await_end(daemon)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere such a daemon ends by itself after 30 s"
)
def test_a_daemon_without_a_connection_ends_with_its_process(tmp_path):
    with peer(tmp_path, 1, script=UNCONNECTED) as process:
        daemon = int(line_of(process, "the daemon's number"))
        assert alive(daemon)
        process.kill()
        ended(process, "the peer")
        await_end(daemon)


def test_a_killed_peer_s_identity_can_be_used_again_at_once(tmp_path):
    async def main():
        alice, path = key_file(tmp_path, 1)
        founder = await DhtDirectory.open(path, run=RUN)
        try:
            with peer(tmp_path, 2, *founder.addresses) as process:
                await asyncio.to_thread(line_of, process, "the daemon's number")
                process.kill()
                ended(process, "the peer")
            again = await DhtDirectory.open(
                tmp_path / "key-2", run=RUN, initial_peers=founder.addresses
            )
            await founder.announce(RUN, record(alice))
            assert await again.peers(RUN) == [record(alice)]
            await again.close()
        finally:
            await founder.close()

    asyncio.run(main())
