"""Hostile peers for disasters and tests: each rides on a real peer and lies in its name.

May import swarm and below. What a liar says is well-formed and signed with its own key.
Start reading at liar.py; registry.py names all of them.
"""
