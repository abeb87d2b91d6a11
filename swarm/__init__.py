"""Peers and bytes: identity, directory, links, agreement, rounds, chunks, paths, simulator.

Knows no tensors and no codecs. The modules here are the seams. Rooms: protocol and paths
(no I/O), then peer (their asyncio glue), and next to it zmq, dht and sim, which implement the
seams.
Start reading at links.py, then protocol/decide.py and peer/peer.py.
"""
