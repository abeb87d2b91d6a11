"""Silence of partners that dialled us, by the time at which the kernel last received from them.

Only the side that dialled sends heartbeats; the other side's libzmq answers them. So each control
connection carries two small messages every `socket.HEARTBEAT_S`, and the answer proves one side as
the question does the other. libzmq gives the asking side a timer that any answer ends. The side
that is asked has none that holds (the time to live in a question ends with the next message, and
nothing renews it), so we ask the kernel: it knows, whatever our loop or the GIL were doing.
"""

from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.socket import ZmqSocket
from farflock.swarm.zmq.sockets import Sockets


class Pulse:
    """Cuts off each partner that dialled us and has been silent for `silent_after_s`."""

    def __init__(self, sockets: Sockets, silent_after_s: float) -> None:
        self._sockets, self._silent_after_s = sockets, silent_after_s
        self.due_s = 0.0  # when to look next: before, nobody can have been silent for too long

    def tick(self, now_s: float) -> None:
        """Look if it is time."""
        if now_s >= self.due_s:
            longest_s = max(map(self._longest, self._sockets.routers), default=0.0)
            self.due_s = now_s + self._silent_after_s - longest_s

    def _longest(self, port: ZmqSocket) -> float:
        """Cut off what is too silent on a socket; return the longest silence of the others."""
        longest_s = 0.0
        if port.lane != CONTROL:
            return longest_s
        for descriptor, connection in list(port.connections.items()):
            if connection.owner is None or connection.kicked:
                continue
            silence_s = connection.silence_s()
            if silence_s < self._silent_after_s:
                longest_s = max(longest_s, silence_s)
            else:
                port.kick(descriptor, "silent")
        return longest_s
