"""Faults that `bench faults` does to a swarm, one function for each row.

May import experiments/bench/workers. Start reading at play.py.
"""
