"""What benchmarks and experiments measure with: one line of the scoreboard, and one thread a process.

Imports nothing of the product.
Start reading at metric.py.
"""
