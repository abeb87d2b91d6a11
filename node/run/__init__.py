"""A run as data: its manifest, its terms, its invite, and the rules by which its parts fit
together.

May import node/model and node/state, but nothing that runs: reading a manifest takes no swarm, no
thread and no tensor values. Start reading at manifest.py; what it resolves to is in terms.py.
"""
