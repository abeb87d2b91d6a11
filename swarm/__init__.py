"""Peers and bytes: identity, directory, links, agreement, rounds, chunks, paths, simulator. Knows no tensor and no codec.

The seams are the modules here; rooms: protocol and paths (no I/O), then peer (their asyncio glue), and beside it zmq, dht
and sim, which implement the seams. Start reading at links.py, then protocol/decide.py and peer/peer.py.
"""
