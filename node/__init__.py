"""One process of a run, from the command line down to the training loop.

Rooms, lowest first: tokens, data, model, state, run, train, (loop.py), assembly, pipeline, process,
then library, simulate and demo, then cli. A room imports only rooms before it, and swarm,
optimizers and compression. Start reading at loop.py.
"""
