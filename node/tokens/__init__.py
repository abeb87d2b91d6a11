"""Text as tokens: tokenizers, how they are trained, and the templates of chats.

May import node/errors.py.

Start reading at tokenizer.py.
"""
