"""Machines for pipeline stages: planners, their cost model, and measured links to test them on.

May import node and swarm; nothing of the product imports it.
Start reading at planner.py.
"""
