"""Words and Markdown for the reference pages."""

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

NOTE = (
    "<!-- Made from the code by `python docs/make_reference.py`; edit the code, not this page. -->"
)
_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())


class Incomplete(Exception):
    """A name in the code has no description, or a description has no name in the code."""


class Words:
    """The descriptions of one section of words.toml; `close` checks that all were used."""

    def __init__(self, section: str) -> None:
        self._section, self._words = section, _WORDS[section]
        self._used: set[str] = set()

    def __getitem__(self, name: str) -> str:
        return self.first(name)

    def first(self, *names: str) -> str:
        """Return the description of the first of these names that has one."""
        for name in names:
            if name in self._words:
                self._used.add(name)
                return " ".join(self._words[name].split())
        raise Incomplete(f"[{self._section}] has no description of {names[0]}; write one")

    def close(self) -> None:
        """Raise `Incomplete` if a description was not used."""
        if left := sorted(self._words.keys() - self._used):
            raise Incomplete(
                f"[{self._section}] describes what the code does not have: {', '.join(left)}"
            )


def described(section: str, names: Iterable[str], columns: Sequence[str]) -> str:
    """Return a table of names and descriptions, which must match each other."""
    words = Words(section)
    rows = [(code(name), words[name]) for name in names]
    words.close()
    return table(columns, rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def code(text: object) -> str:
    """Return inline code; an empty string for nothing."""
    return f"`{text}`" if str(text) else ""


def docstring(thing: object) -> str:
    """Return an object's docstring as Markdown: bare names of other notations stay as they are."""
    return inspect.cleandoc(inspect.getdoc(thing) or "")


def paragraphs(text: str) -> str:
    """Return a docstring with its indented parts as code blocks, which keep their columns."""
    parts = []
    for part in text.split("\n\n"):
        lines = part.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            parts.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        else:
            parts.append(_escaped(part))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Return text without marks of Markdown but for inline code."""
    spans = text.split("`")
    for number in range(0, len(spans), 2):
        spans[number] = re.sub(r"([*_])", r"\\\1", spans[number]).replace("<", "&lt;")
    return "`".join(spans)


def page(title: str, intro: str, sections: Mapping[str, str]) -> str:
    """Return a whole page."""
    parts = [f"# {title}", NOTE, intro.strip()]
    parts += [f"## {heading}\n\n{body.strip()}" for heading, body in sections.items()]
    return "\n\n".join(parts) + "\n"
