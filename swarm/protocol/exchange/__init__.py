"""One exchange of a whole group: offers, a mean or a gather, and the close list that all apply.

May import swarm's seams and swarm/protocol; no asyncio, no clock, no socket. Start reading at
collective.py, then closing.py, whose table says how an exchange ends.
"""
