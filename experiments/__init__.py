"""Benchmarks and paper reproductions.

Imports all, imported by none. Rooms, lowest first: measure, placement, pipelines, reproduce,
quality, bench. Start reading at reproduce/command.py or bench/command.py.
"""
