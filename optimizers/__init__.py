"""Methods: tensors in, tensors out. Knows no peer, no byte count and no clock.

May import compression alone.
Start reading at method.py, then diloco.py.
"""
