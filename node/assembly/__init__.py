"""The core of every node, and one node with a whole model: its assembly over a peer, its
checkpoints, and its resumption.

May import node/loop.py, node/train, node/state, node/run and node/model.

Start reading at core.py, then node.py.
"""
