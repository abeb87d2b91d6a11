"""The exchanges of one peer: collective rounds with their logs, and pairs.

May import swarm's seams and protocol. Start reading at rounds.py; a round that is open continues in
open_rounds.py, and one that is decided in round_log.py.
"""
