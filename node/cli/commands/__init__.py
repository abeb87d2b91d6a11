"""One module a command of the command line; each is imported only when its command is run."""
