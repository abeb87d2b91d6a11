"""A hostile peer as a process: it comes in with a real invite by the product's own library, and
then commits one attack until it is ended.

`python tests/adversaries/hostile.py ATTACK INVITE --folder FOLDER`: INVITE is a file. Once it
begins, it writes a line of JSON: the Unix time, and the ids of all peers that it is.

tests/net/test_attacks.py has "hijack", "tokens", "void", "evict-by-proposal", "record" and
"eclipse"; the others lie in the disasters of `farflock sim --chaos --liars`.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program finds its own folder only

from adversaries.outsiders import (
    BAD_RECORDS,
    DECOYS,
    bad_records,
    eclipse,
    made_up_keys,
)

from farflock.node.process import node_process
from farflock.node.process.network import MachineOptions, identity_of
from farflock.node.run.invite import parse
from farflock.node.simulate.liars.registry import LIARS
from farflock.node.state.paths import RunFolder

POLL_S = 0.1
ATTACKS = (*LIARS, "record", "eclipse")


def begins(*peers):
    """Say that the attack begins, and who is in it."""
    sys.stdout.write(json.dumps({"time_s": time.time(), "peers": peers}) + "\n")
    sys.stdout.flush()


async def counted(process):
    """Return once the run counts this node: as a member, and in a round."""
    while not (process.member.peer.membership.is_member and process.journal.rounds):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


async def attack_from_inside(attack, identity, process):
    """Be an honest member first, and a hostile one from the first counted round on."""
    await counted(process)
    if attack == "record":
        keys = [identity, *made_up_keys(BAD_RECORDS)]
        await bad_records(process, keys, lambda: begins(*(key.peer for key in keys)))
    else:
        begins(identity.peer)
        async with LIARS[attack](process.member.peer, identity).lying():
            await asyncio.Event().wait()


async def be_member(attack, machine, identity, invite):
    """Join as any member does, and attack beside that."""
    async with asyncio.TaskGroup() as tasks:

        def joined(process):
            tasks.create_task(attack_from_inside(attack, identity, process))

        await node_process.join(machine, invite, joined)


async def main(attack, invite_file, folder):
    machine = MachineOptions(RunFolder(folder))
    identity, invite = (
        identity_of(machine.folder),
        parse(invite_file.read_text().strip(), time.time()),
    )
    if attack == "eclipse":
        keys = made_up_keys(DECOYS)
        who = [key.peer for key in (identity, *keys)]
        await eclipse(machine, identity, invite, keys, lambda: begins(*who))
    else:
        await be_member(attack, machine, identity, invite)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("invite", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(main(given.attack, given.invite, given.folder))
