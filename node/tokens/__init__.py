"""Text as tokens: bytes, any tokenizer.json, and tokenizers learned from texts.

May import swarm's names of chunks, and nothing else of ours.

Start reading at tokenizer.py.
"""
