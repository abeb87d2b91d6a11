"""`python -m farflock.node.cli`: the command line, for installations without the script."""

from farflock.node.cli.main import main

main()
