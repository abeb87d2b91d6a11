"""Processes of benchmarks: how they are started, on which hosts, and what each of them does.

May import experiments/measure. Start reading at fleet.py.
"""
