"""Path policies that route microbatches (SWARM, NoLoCo, CheckFree+, SkipPipe), as pure functions.

May import swarm/links.py alone.
Start reading at policy.py.
"""
