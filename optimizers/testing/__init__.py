"""The laws of a method as functions that anybody can call, without pytest, and a loopback swarm to call them on.

May import optimizers' seams; nothing imports it but tests and farflock/testing.py.
Start reading at check.py.
"""
