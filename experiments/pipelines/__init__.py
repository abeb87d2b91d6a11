"""Computations about pipelines for `farflock reproduce`: formulas, simulations, small trainings.

May import experiments/measure and placement.
Start reading at catalog.py.
"""
