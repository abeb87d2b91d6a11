"""Where a run can be watched: what a node measures goes to files and to tools that people know.

May import node/state and what lies below it. Each sink is fed from a thread of its own, so none can
stop training.

Start reading at measures.py, then feed.py.
"""
