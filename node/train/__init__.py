"""The parts of a training step and of an exchange: driver, shards, exchange client, state sync.

May import node/run and node/model. The loop over these parts is node/loop.py. Start reading at
driver.py, then exchange_client.py.
"""
