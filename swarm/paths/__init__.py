"""Path policies: who gets a microbatch next (SWARM, NoLoCo, CheckFree+, SkipPipe), as pure functions.

May import swarm/links.py alone.
Start reading at policy.py.
"""
