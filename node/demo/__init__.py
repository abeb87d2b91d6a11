"""The demos: real processes on this machine, and the lines that their result is held against.

May import node/process and below.
Start reading at demo.py.
"""
