"""Agreement of an electorate on one value, by single-decree Paxos whose voters sign what they say.

May import only swarm's seams; no asyncio, no clock, no socket. Start reading at decide.py, then
justified.py, turns.py and convictions.py.
"""
