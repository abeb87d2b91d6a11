"""The demos: real processes on this machine, and the baselines that their result is compared with.

May import node/process and below.
Start reading at demo.py.
"""
