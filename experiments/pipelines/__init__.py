"""Computations about pipelines for `farflock reproduce`: no training run, or stages alone.

May import experiments/measure and placement.
Start reading at catalog.py.
"""
