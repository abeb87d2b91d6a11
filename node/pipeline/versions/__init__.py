"""Weights and tables by round: stashes for late gradients, the subspace's constraint, versions of the frozen embedding.

May import node/pipeline/passes and node/train.
Start reading at versions.py.
"""
