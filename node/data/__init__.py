"""Prepared data: documents as tokens, in shards that are named by their hashes.

    documents -> shuffle -> shards, pages and an index   (`farflock data prepare`)
    index -> draws -> packed shards -> sequences         (every trainer of a run)

May import node/model, node/state, node/errors.py and swarm's names of chunks.

Start reading at index.py.
"""
