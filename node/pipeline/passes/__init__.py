"""What passes between a trainer and the servers of stages: requests, tensors as payloads, and a stage's own arithmetic.

May import node/run and node/model.
Start reading at stage.py, then requests.py.
"""
