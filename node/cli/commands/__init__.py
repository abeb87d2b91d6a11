"""One module per command; each is imported only when its command runs.

May import every room of node.
Start reading at run.py.
"""
