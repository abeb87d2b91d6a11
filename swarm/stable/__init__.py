"""The memory of a voter over its lives, and the seam to where it is kept.

May import swarm's seams and protocol. Start reading at recollection.py.
"""
