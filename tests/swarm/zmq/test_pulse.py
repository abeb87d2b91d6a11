"""Silent partners that dialled us: who is cut off, and when the next look is due."""

import pytest

from farflock.swarm.zmq.outbox import BULK, CONTROL
from farflock.swarm.zmq.pulse import Pulse


class Fake:
    """A connection; `silence_s` None: its owner is not proven."""

    def __init__(self, silence_s):
        self.owner = None if silence_s is None else "peer"
        self.kicked = False
        self.looks = 0
        self._silence_s = silence_s

    def silence_s(self):
        self.looks += 1
        return self._silence_s


class Port:
    def __init__(self, lane, *silences):
        self.lane = lane
        self.connections = dict(enumerate(map(Fake, silences)))

    def kick(self, descriptor, reason):
        assert reason == "silent"
        self.connections[descriptor].kicked = True


class Ports:
    def __init__(self, *routers):
        self.routers = list(routers)


@pytest.mark.parametrize(
    ("silences", "cut", "due_s"),
    [
        ([], [], 10.75),
        ([0.0, 0.25], [], 10.5),
        ([0.5, 0.75, None], [1], 10.25),
        ([9.0, 0.74], [0], 10.01),
        ([9.0], [0], 10.75),
    ],
)
def test_who_is_silent_for_too_long_is_cut_off(silences, cut, due_s):
    control, bulk = Port(CONTROL, *silences), Port(BULK, 9.0)
    pulse = Pulse(Ports(control, bulk), 0.75)
    pulse.tick(10.0)
    fakes = control.connections
    assert [index for index, fake in fakes.items() if fake.kicked] == cut
    assert pulse.due_s == pytest.approx(due_s)
    pulse.tick(pulse.due_s - 0.001)
    assert all(fake.looks <= 1 for fake in fakes.values())
    pulse.tick(pulse.due_s)
    assert all(fakes[index].looks == 1 for index in cut)
    assert not bulk.connections[0].looks


def test_without_listening_sockets_there_is_nothing_to_hear():
    pulse = Pulse(Ports(), 0.75)
    pulse.tick(10.0)
    assert pulse.due_s == 10.75
