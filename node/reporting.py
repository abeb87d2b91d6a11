"""The callback for what happens in a node: an event's kind and fields, for history and live
view."""

from collections.abc import Callable

Report = Callable[[str, dict[str, object]], None]
