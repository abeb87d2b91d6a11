"""One module a command; each is imported only when its command is run.

May import every room of node.
Start reading at run.py.
"""
