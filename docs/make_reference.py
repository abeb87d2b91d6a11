"""Make docs/reference/ from the code: `python docs/make_reference.py`, or with `--check` fail if a
page is stale.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from generate import codecs, commands, manifest, methods, python, records

FOLDER = Path(__file__).with_name("reference")
PAGES: dict[str, Callable[[], str]] = {
    "manifest.md": manifest.make,
    "methods.md": methods.make,
    "codecs.md": codecs.make,
    "commands.md": commands.make,
    "events.md": records.make_events,
    "status.md": records.make_status,
    "measures.md": records.make_measures,
    "python.md": python.make,
}


def stale(name: str, text: str) -> list[str]:
    """Return the differences between a page and what the code says, as lines of a diff."""
    path = FOLDER / name
    before = path.read_text() if path.exists() else ""
    return list(
        difflib.unified_diff(
            before.splitlines(),
            text.splitlines(),
            f"docs/reference/{name}",
            "the code",
            lineterm="",
        )
    )


def main() -> int:
    """Write the pages, or compare them with the code; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if stale")
    check = parser.parse_args().check
    differences = []
    for name, make in PAGES.items():
        text = make()
        differences += stale(name, text)
        if not check:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(text)
    if check and differences:
        sys.stderr.write("\n".join(differences))
        sys.stderr.write("\nthe reference is stale; run `python docs/make_reference.py`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
