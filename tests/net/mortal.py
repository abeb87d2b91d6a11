"""A peer that kills itself at a chosen point of an exchange, among whole nodes on real links.

Run as a program, with a folder, a number and a point, this is one peer. It finds the others by
the records in the folder, trains with DiLoCo, writes there what happens to it, and ends when a
file `finish` appears. The first peer to reach the chosen point dies there; the file `victim`
says which one that was.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from worlds.peers import identity, peer_over
from worlds.waiting import LIMIT_S

from farflock.node.assembly.node import replica_node
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import PRESETS
from farflock.node.run.terms import RunPlan
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import Worker
from farflock.swarm.frame import unpack
from farflock.swarm.links import joined
from farflock.swarm.messages import Decided, Holds, Offer, Piece, Propose, Reduced
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

RUN, SEED = "mortal", 3
PEERS, PERIOD, BATCH, SEQ = 4, 5, 2, 32
TOKENS = PEERS * PERIOD * BATCH * SEQ * 10
FIRST_ROUND = 3  # from then on the chosen point is the end
STREAM = "delta"


class Killer:
    """Watches what a peer sends, and kills it with SIGKILL at the point `phase`; one peer dies."""

    def __init__(self, links, phase, chosen):
        self._phase, self._chosen = phase, chosen
        self._send, self._send_bulk = links.send, links.send_bulk
        self._offered, self._proposed = set(), set()
        links.send, links.send_bulk = self.send, self.send_bulk

    def send(self, peer, frame):
        self._judge(unpack(frame).message)
        return self._send(peer, frame)

    async def send_bulk(self, peer, frame, timeout_s):
        """Pieces: others ask for my contribution only once they have my offer."""
        message = unpack(joined(frame)).message
        if (
            self._phase == "after its offer"
            and isinstance(message, Piece)
            and message.digest in self._offered
        ):
            self._die()
        return await self._send_bulk(peer, frame, timeout_s)

    def _judge(self, message):
        key = getattr(message, "key", None)
        if key is None or key.stream != STREAM or key.round < FIRST_ROUND:
            return
        match message, self._phase:
            case Offer(), "before its offer":
                self._die()
            case Offer(digests=digests), _:
                self._offered |= set(digests)
            case Reduced(), "while it reduces":
                self._die()
            case Reduced(), "after it has reduced":
                self._proposed.add(key)
            case Holds(), "after it has reduced" if key in self._proposed:
                self._die()
            case Propose(), "when it has proposed":
                self._proposed.add(key)
            case Decided(), "when it has proposed" if key in self._proposed:
                self._die()

    def _die(self):
        if self._chosen():
            os.kill(os.getpid(), signal.SIGKILL)


class Life:
    """One peer from its birth to its end."""

    def __init__(self, folder, number, phase, text):
        self.folder, self.number, self.phase, self.text = folder, number, phase, text
        self.log = (folder / f"log-{number}").open("a", buffering=1)
        self.part = None

    def note(self, kind, fields=None):
        if kind != "step":
            noted = {
                "at_s": time.monotonic(),
                "kind": kind,
                **(fields or {}),
                "step": self.part.loop.step,
            }
            self.log.write(json.dumps(noted) + "\n")

    def chosen(self):
        """True if this peer is the victim: the first one that asks is."""
        with contextlib.suppress(FileExistsError):
            with (self.folder / "victim").open("x") as file:
                file.write(str(self.number))
            self.note("dies")
            return True
        return False

    async def live(self):
        mine, life = identity(self.number), self.number + 1
        links = await ZmqLinks.open(mine, RUN, LinkOptions(incarnation=life))
        try:
            records = await self.introduced(links)
            terms, codecs = RunTerms(RUN, SEED, view_s=0.5), Worker("codec")
            peer = peer_over(links, mine, terms, life, record=links.record, compute=codecs)
            inner, schedule = (
                InnerConfig(lr=3e-3),
                Schedule(3e-3, TOKENS, warmup_tokens=TOKENS // 10),
            )
            plan = RunPlan(
                *(SEED, PRESETS["tiny"], inner, schedule, "diloco", {"period": PERIOD}),
                batch=BATCH,
                seq=SEQ,
            )
            self.part = replica_node(
                plan, peer, self.text, compute=codecs, train=Worker("train"), report=self.note
            )
            async with peer.running():
                await self.take_part(links, records)
        finally:
            await links.close()

    async def introduced(self, links):
        """Hand my record over, and learn everybody's."""
        place = self.folder / f"record-{self.number}"
        place.with_suffix(".partial").write_bytes(links.record())
        os.replace(place.with_suffix(".partial"), place)
        places = [self.folder / f"record-{number}" for number in range(PEERS)]
        while not all(path.exists() for path in places):  # noqa: ASYNC110 - other processes' files
            await asyncio.sleep(0.02)
        records = [path.read_bytes() for path in places if path != place]
        for record in records:
            links.learn(record)
        return records

    async def take_part(self, links, records):
        part = self.part
        self.note("introduced")
        if self.number == 0:
            part.found()
        else:
            await part.join(records, LIMIT_S)
        while len(part.peer.context.views.newest.members) < PEERS:  # noqa: ASYNC110 - views come by themselves
            await asyncio.sleep(0.02)
        self.note("begins")
        Killer(links, self.phase, self.chosen)
        await part.loop.run(TOKENS, drain_s=LIMIT_S)
        self.note("trained")
        while not (self.folder / "finish").exists():  # noqa: ASYNC110 - the test's file
            await asyncio.sleep(0.05)
        await part.loop.begin_step()
        driver = part.loop.driver
        state = driver.method.snapshot(driver.replica)
        self.note(
            "end",
            {
                "state": state_hash(state).hex(),
                "round": int(state["round"]),
                "agreed": part.loop.driver.position.agreed_tokens,
                "uncounted": part.loop.driver.position.own_tokens,
            },
        )


def main(folder, number, phase):
    torch.set_num_threads(1)
    text = text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:100_000]))
    asyncio.run(Life(Path(folder), int(number), phase, text).live())


if __name__ == "__main__":
    main(*sys.argv[1:])
