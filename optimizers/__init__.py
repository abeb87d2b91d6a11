"""Methods: tensors in, tensors out. They know no peer, no byte count and no clock.

The modules here are the core methods; rooms: parts, contrib, testing.
May import compression alone.
Start reading at method.py, then diloco.py.
"""
