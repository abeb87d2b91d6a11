"""One stage at one node, from its beginning to its end: where its state comes from, and when its server moves.

May import node/assembly, and node/pipeline's passes, recovery, trainer and server.
Start reading at assembly.py.
"""
