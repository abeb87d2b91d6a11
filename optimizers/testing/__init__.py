"""The laws of methods as functions, callable without pytest, and a loopback swarm to run them on.

May import optimizers' seams; only tests and farflock/testing.py import it.
Start reading at check.py.
"""
