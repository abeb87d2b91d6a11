"""A run as data: its manifest, terms and invite, and the rules by which its parts fit together.

May import node/model and node/state, but nothing that runs: a manifest is read without a swarm, a
thread or a tensor's values.
Start reading at manifest.py; what it resolves to is in terms.py.
"""
