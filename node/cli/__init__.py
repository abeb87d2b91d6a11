"""The command line: the table of commands, the module that prints, and the live view.

May import every room of node. Nothing heavy is imported until a command runs.
Start reading at main.py.
"""
