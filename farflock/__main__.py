"""`python -m farflock`: the command line, for torchrun and for installations without the script."""

from farflock.node.cli.main import main

main()
