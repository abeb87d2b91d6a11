"""Pipeline computations for `farflock reproduce`: formulas, simulations, small training runs.

May import experiments/measure and placement.
Start reading at catalog.py.
"""
