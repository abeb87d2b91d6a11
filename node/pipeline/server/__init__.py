"""A stage server: it computes passes for trainers and hands their gradients to the training loop.

May import node/pipeline's passes and recovery, and node/train.
Start reading at server.py.
"""
