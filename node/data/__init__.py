"""Prepared data: texts become shards of tokens that are named by their hashes, in a folder.

May import node/tokens, node/durable.py, node/errors.py, and swarm's names of chunks.

Start reading at prepare.py; what a folder holds is in index.py, and what a peer reads of it in
samples.py.
"""
