"""One stage at one node, from start to end: its assembly, initial state and moves.

May import node/assembly, and node/pipeline's passes, recovery, trainer and server.
Start reading at assembly.py.
"""
