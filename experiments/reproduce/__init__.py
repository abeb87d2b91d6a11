"""`farflock reproduce`: papers' claims, tested at the scale of this machine, with a verdict.

May import experiments/pipelines and below.
Start reading at command.py, then recipe.py.
"""
