"""Farflock trains one model on machines that are far apart. Importing it loads neither torch nor the network."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("farflock")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
