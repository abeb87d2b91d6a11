"""Passes through stages: requests of trainers, tensors as payloads, and a stage's own arithmetic.

May import node/run and node/model.
Start reading at stage.py, then requests.py.
"""
