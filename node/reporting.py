"""How the parts of a node report what happens: an event's kind and its fields, for the history and the live view."""

from collections.abc import Callable

Report = Callable[[str, dict[str, object]], None]
