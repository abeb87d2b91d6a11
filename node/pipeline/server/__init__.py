"""A stage server: it computes passes for trainers and gives what counts to the ordinary loop.

May import node/pipeline's passes and recovery, and node/train.
Start reading at server.py.
"""
