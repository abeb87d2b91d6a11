"""`farflock bench quality`: the share of communication's gain kept at 1/100 or 1/500 of the bytes.

May import experiments/measure and experiments/reproduce.
Start reading at screen.py.
"""
