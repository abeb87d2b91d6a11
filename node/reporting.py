"""The callback for a node's events: a kind and its fields, for the history and the live view."""

from collections.abc import Callable

Report = Callable[[str, dict[str, object]], None]
