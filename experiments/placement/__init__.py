"""Which machines serve which stage: planners, their cost model, and measured links to try them on.

May import node and swarm; nothing of the product imports it.
Start reading at planner.py.
"""
