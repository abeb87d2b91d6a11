"""Path policies that route microbatches (SWARM, NoLoCo, CheckFree+, SkipPipe), as pure functions.

May import only swarm/links.py.
Start reading at policy.py.
"""
