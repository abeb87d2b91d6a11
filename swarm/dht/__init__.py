"""The directory over libp2p: hivemind's daemon and Kademlia protocol inside our own event loop.

May import only swarm's seams. Only kademlia.py and daemon.py import hivemind, so import them late.
Start reading at kademlia.py.
"""
