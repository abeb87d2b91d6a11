"""Agreement on the members of a run: admission, the next view, and views on their way.

May import swarm's seams, protocol, stable and peer/rounds. Start reading at membership.py, then
next_view.py, whose rules are in view_rules.py and refounding.py.
"""
