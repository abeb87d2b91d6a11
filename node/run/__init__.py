"""What a run is, as data: its manifest, its terms, its invite, and the rules by which they fit together.

May import node/model and node/state, but nothing that runs: a manifest is read without a swarm, a thread or a tensor's values.
Start reading at manifest.py; what it resolves to is in terms.py.
"""
