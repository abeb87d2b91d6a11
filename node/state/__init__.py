"""A node's files: checkpoints, the history of its run, and the folders they are in.

May import node/model and swarm's seams.

Start reading at checkpoint.py.
"""
