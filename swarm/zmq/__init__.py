"""Links over TCP: CURVE-encrypted ZeroMQ, or sealed frames through a third peer.

May import swarm's seams alone.
Start reading at links.py.
"""
