"""Whole runs, and seeded disasters, in virtual time on a simulated network.

May import node/process and below, and swarm/sim. It runs the product's own nodes.
Start reading at simulation.py, then chaos.py.
"""
