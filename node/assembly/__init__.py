"""One node with a whole model, put together over a peer; its checkpoints, and how it is taken up again.

May import node/loop.py, node/train, node/state, node/run and node/model.
Start reading at node.py.
"""
