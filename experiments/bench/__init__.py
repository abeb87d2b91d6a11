"""`farflock bench`: the scoreboard, one module per benchmark, each with a yardstick.

May import experiments/measure, placement and quality.
Start reading at command.py.
"""
