"""Chains of views at one peer: where a new one begins, and which of two that meet stays.

May import what swarm/peer may. Start reading at branching.py.
"""
