"""Recovery of a stage whose servers are all lost, from its neighbours (CheckFree, CheckFree+).

May import node/model. Pure functions of tensors and of the living servers.
Start reading at rebuild.py.
"""
