"""A trained model in use: model cards, files for llama.cpp, the hub, and evaluations.

May import node/state and below.
Start reading at model_card.py.
"""
