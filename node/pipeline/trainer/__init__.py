"""A pipeline's trainer: it draws microbatches and takes each one forward and back through the
stages.

May import node/pipeline/passes and node/train.
Start reading at trainer.py, then walker.py.
"""
