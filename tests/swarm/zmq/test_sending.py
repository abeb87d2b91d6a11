"""A limited uplink: bulk waits for it, control does not, and partners take turns."""

import asyncio

from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.zmq.outbox import BULK, CONTROL, Outbox, Pool
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.rate_limit import HEADERS, SAVED_S, RateLimit
from farflock.swarm.zmq.sending import Sender
from farflock.swarm.zmq.zap import Gate

RATE, SIZE = 100_000.0, 10_000


class Port:
    """A socket that takes everything, and notes when."""

    def __init__(self, lane):
        self.lane, self.connections, self.written = lane, {}, []

    def write(self, address, payload):
        self.written.append((asyncio.get_running_loop().time(), address, len(payload)))
        return True


class Swarm:
    """A sender with connected partners."""

    def __init__(self, count):
        self.table = PartnerTable("me", Gate("run", "me", ()))
        self.sender = Sender(self.table, None, RateLimit(RATE))
        self.ports, self.partners = (Port(CONTROL), Port(BULK)), []
        for number in range(count):
            partner = Partner(f"p{number}", Outbox(Pool()))
            for lane in (CONTROL, BULK):
                route = Route(self.ports[lane], b"%d" % number, number, partner.peer, "key")
                partner.routes[lane].append(route)
            self.partners.append(partner)

    async def fill(self, frames):
        await asyncio.gather(
            *(
                self.sender.put_bulk(partner, bytes(SIZE), 60.0)
                for _ in range(frames)
                for partner in self.partners
            )
        )


def test_bulk_goes_at_the_rate_of_the_line_and_control_at_once():
    async def main():
        swarm = Swarm(1)
        await swarm.fill(20)
        await asyncio.sleep(0.5)
        assert swarm.sender.put(swarm.partners[0], b"urgent")
        ((at_s, _, _),) = swarm.ports[CONTROL].written
        assert at_s == asyncio.get_running_loop().time()
        await asyncio.sleep(60.0)
        times = [at_s for at_s, *_ in swarm.ports[BULK].written]
        assert len(times) == 20
        takes_s = HEADERS * 19 * SIZE / RATE
        assert takes_s - SAVED_S <= times[-1] - times[0] <= takes_s + 0.01
        swarm.sender.close()

    run_virtual(main())


def test_partners_take_turns_on_a_limited_line():
    async def main():
        swarm = Swarm(3)
        await swarm.fill(4)
        await asyncio.sleep(60.0)
        order = [address for _, address, _ in swarm.ports[BULK].written]
        assert sorted(order) == sorted(4 * [b"0", b"1", b"2"])
        assert all(len(set(order[at : at + 3])) == 3 for at in range(3, 10, 3))
        swarm.sender.close()

    run_virtual(main())


def test_what_waits_for_a_limited_line_waits_for_this_peers_own():
    async def main():
        swarm = Swarm(1)
        await swarm.fill(20)
        assert swarm.sender.queued_bytes() > 10 * SIZE  # or states would leave between rounds
        await asyncio.sleep(60.0)
        assert swarm.sender.queued_bytes() == 0
        swarm.sender.close()

    run_virtual(main())


def test_a_closed_sender_writes_no_more():
    async def main():
        swarm = Swarm(1)
        await swarm.fill(5)
        written = len(swarm.ports[BULK].written)
        swarm.sender.close()
        await asyncio.sleep(60.0)
        assert len(swarm.ports[BULK].written) == written

    run_virtual(main())
