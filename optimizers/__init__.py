"""Methods: tensors in, tensors out. Knows no peer, no byte count and no clock.

The core's methods are the modules here; rooms: parts, contrib, testing. May import compression alone.
Start reading at method.py, then diloco.py.
"""
