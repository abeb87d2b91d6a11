"""Links over TCP: CURVE-encrypted ZeroMQ, and sealed frames through a third peer where two cannot dial each other.

May import swarm's seams alone.
Start reading at links.py.
"""
