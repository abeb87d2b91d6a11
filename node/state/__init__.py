"""What a node keeps on disk: checkpoints, the history of its run, and where the files are.

May import node/model and swarm's seams.
Start reading at checkpoint.py.
"""
