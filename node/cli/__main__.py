"""`python -m farflock.node.cli`: the command line where no script is installed."""

from farflock.node.cli.main import main

main()
