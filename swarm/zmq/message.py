"""The kinds of messages on a ZMQ connection.

Message (always a single part): one kind byte, then its content.

- 1 record: the sender's signed record, the first message of every connection, both ways
- 2 frame: one frame of the links (swarm/links.py)
- 3 ping and 4 pong: a token (8 bytes), which the pong repeats
- 5 to a relay and 6 from a relay: both as in swarm/zmq/forward.py
- 7 taken: how many bytes of bulk frames its sender has read on this connection (8 bytes); the
  other side sends no more than a window ahead of it
- 8 twin: another life of the receiver is connected here; its vouch for that (64 bytes)
- 9 observe and 10 observed: at which address this peer is dialled, as in swarm/zmq/witness.py
- 11 vouch?: the number of another life of the receiver (8 bytes), and 12 vouch, the answer: the
  same, and its sender's signature of it (64 bytes; both as in swarm/zmq/twins.py)
"""

RECORD, FRAME, PING, PONG, FORWARD, FORWARDED, TAKEN = (bytes([kind]) for kind in range(1, 8))
TWIN, OBSERVE, OBSERVED, ASK_VOUCH, VOUCH = (bytes([kind]) for kind in range(8, 13))
TOKEN_BYTES = 8
LIFE_BYTES = 8
