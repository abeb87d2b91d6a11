"""The use of a trained model: the card of an export, and evaluations.

May import node/assembly and below.

Start reading at model_card.py.
"""
