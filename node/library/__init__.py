"""Farflock for any PyTorch loop: the public `SwarmOptimizer` and `local_swarm`.

May import node/process and below.

Start reading at swarm_optimizer.py.
"""
