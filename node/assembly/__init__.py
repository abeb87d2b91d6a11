"""The way into a run; a node's part in it, and the core of each; and one with a whole model: its
assembly over a peer, its checkpoints, and its resumption.

May import node/loop.py, node/train, node/state, node/run and node/model.

Start reading at session.py, part.py and core.py, then node.py.
"""
