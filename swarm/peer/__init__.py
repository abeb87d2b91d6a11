"""One peer of a run: the asyncio glue around the machines of swarm/protocol.

May import swarm's seams, protocol and paths.
Start reading at peer.py; a round goes on in rounds.py and round_log.py.
"""
