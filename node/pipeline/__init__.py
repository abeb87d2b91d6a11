"""Models cut into stages: a stage server, a trainer, both, or a full replica, as one node of a run.

Rooms, lowest first: recovery and passes, server and trainer, lifecycle, contrib. May import
node/assembly and below.

Start reading at node.py, then trainer/trainer.py and server/server.py.
"""
