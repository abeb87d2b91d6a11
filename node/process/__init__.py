"""A node as a process: real links and directory, worker threads, files, signals, and its status.

May import every room of node but library, simulate, demo and cli.
Start reading at entering.py and node_process.py.
"""
