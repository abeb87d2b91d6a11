"""Links over TCP: CURVE-encrypted ZeroMQ, or sealed frames through a third peer.

May import only swarm's seams.
Start reading at links.py.
"""
