"""A stage that nobody holds any more, made from what its neighbours hold (CheckFree, CheckFree+).

May import node/model. Pure functions of tensors and of who lives.
Start reading at rebuild.py.
"""
