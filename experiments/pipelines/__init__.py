"""Computations about pipelines that `farflock reproduce` tabulates: no training run, or stages alone.

May import experiments/measure and placement.
Start reading at catalog.py.
"""
