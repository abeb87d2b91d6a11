"""The model and its data: decoder, corpus, batches, evaluation, export, and replicas.

May import node/data, node/tokens, node/durable.py, node/errors.py, optimizers and compression.

Start reading at llama.py; a method sees a model only through replica.py.
"""
