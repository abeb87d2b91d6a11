"""Methods: tensors in, tensors out. They know nothing of peers, byte counts and clocks.

The modules here are the core methods; the rooms are parts, contrib and testing.
May import only compression.
Start reading at method.py, then diloco.py.
"""
