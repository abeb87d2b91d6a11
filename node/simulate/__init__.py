"""Whole runs, and seeded disasters, in virtual time on a simulated network.

May import node/process and below, and swarm/sim. The nodes are the real ones.
Start reading at simulation.py and lives.py, then chaos.py; homes.py has lives with folders.
"""
