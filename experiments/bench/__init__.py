"""`farflock bench`: the scoreboard. One module a benchmark, each beside a yardstick in the same call.

May import experiments/measure, placement and quality.
Start reading at command.py.
"""
