"""One stage at one node, from start to end: its assembly, its initial state, and its server's moves.

May import node/assembly, and node/pipeline's passes, recovery, trainer and server.
Start reading at assembly.py.
"""
