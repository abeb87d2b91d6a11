"""A network, a clock and a directory in virtual time; the same seed gives the same frames.

May import swarm's seams and swarm/dht/validator.py.
Start reading at network.py.
"""
