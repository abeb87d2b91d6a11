"""Models cut into stages: a stage server, a trainer, both, or a full replica, as one node of a run.

Rooms, lowest first: recovery, passes, memory and versions, server and trainer, lifecycle. May import node/assembly and below.
Start reading at node.py, then trainer/trainer.py and server/server.py.
"""
