"""Each message that docs/troubleshooting.md explains is one that the code can print.

The headings are the phrases: what stands between two values of a message, `…` for a value. If a
message changes, change its heading.
"""

import ast
import functools
import re
from pathlib import Path

from tidy import measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FOLDERS = ("node", "swarm", "optimizers", "compression", "experiments")
SECTION = re.compile(r"^### ([^\n]+)\n\n(.*?)(?=^##|\Z)", re.M | re.S)
MIN_PHRASES = 30


def sections():
    """(phrases of the heading, text) of each message."""
    return [(re.findall(r"`([^`]+)`", head), body) for head, body in SECTION.findall(PAGE)]


def texts(tree):
    """All texts of a tree; values inside them are `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub("%[sd]", "…", node.value)


@functools.cache
def known():
    """All texts of the code."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(text for path in paths for text in texts(measure.parsed(path)))


def test_every_explained_message_is_in_the_code():
    code = known()
    assert not [phrase for phrases, _ in sections() for phrase in phrases if phrase not in code]


def test_many_messages_are_explained_and_each_once():
    phrases = [phrase for found, _ in sections() for phrase in found]
    assert len(phrases) >= MIN_PHRASES
    assert len(set(phrases)) == len(phrases)


def test_every_message_has_a_cause_and_a_remedy():
    for phrases, body in sections():
        assert phrases
        assert "**Why**" in body, phrases
        assert "**What to do**" in body, phrases


def test_a_phrase_that_no_code_has_would_be_found():
    assert "the invite is damaged" in known()
    assert "the moon is in the way" not in known()
    assert "port … is taken" in texts(ast.parse("f'port {port} is taken'"))
