"""Calls from one peer to another, which pipelines make, with their payloads.

May import swarm's seams and protocol. Start reading at calls.py; at the other side, a call
continues in call_server.py.
"""
