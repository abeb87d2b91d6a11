"""Tools for benchmarks and experiments: a line of the scoreboard, and one thread per process.

Imports nothing of the product.
Start reading at metric.py.
"""
