"""Benchmarks and paper reproductions.

May import everything; nothing imports it (node/cli names its commands in strings). Rooms, lowest
first: measure, placement, pipelines, reproduce, quality, bench.
Start reading at reproduce/command.py or bench/command.py.
"""
