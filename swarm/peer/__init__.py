"""One peer of a run: the asyncio glue around the state machines of swarm/protocol.

May import swarm's seams, protocol and paths. Start reading at peer.py; a round continues in
rounds/rounds.py and rounds/round_log.py.
"""
