"""Agreement as state machines without I/O: messages and time in, messages out.

May import only swarm's seams; no asyncio, no clock, no socket. Start reading at
agreement/decide.py, then views.py and exchange/collective.py.
"""
