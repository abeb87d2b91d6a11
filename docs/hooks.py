"""Additions to MkDocs: pages are listed by pattern, and a reader's browser fetches nothing from
elsewhere.
"""

import fnmatch
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

DRAWING = ("assets/mermaid.min.js", "assets/diagrams.js")
CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
MAX_SHORT_CELL = 50  # characters
OPTION = re.compile(r"(?<![^\s>])--?[a-z][\w-]*")
REMOTE = "https://unpkg.com/"  # from where the theme's script would load what we have here


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the patterns in the navigation by the pages that no other entry names."""
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    named = set(_named(config.nav or []))
    config.nav = _listed(config.nav or [], pages, named)
    return config


def _named(nav: Any) -> list[str]:  # noqa: ANN401 - lists, tables and texts
    if isinstance(nav, str):
        return [nav] if "*" not in nav else [nav.removesuffix("*")]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [name for entry in entries for name in _named(entry)]


def _listed(nav: list[Any], pages: list[str], named: set[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            inner = inner if isinstance(inner, str) else _listed(inner, pages, named)
            found += [{title: inner}] if inner else []
        elif "*" in entry:
            found += [page for page in pages if _fits(page, entry, named)]
        else:
            found.append(entry)
    return found


def _fits(page: str, pattern: str, named: set[str]) -> bool:
    if pattern.endswith(".md*"):
        return page == pattern.removesuffix("*")
    same_folder = page.count("/") == pattern.count("/")
    return same_folder and page not in named and fnmatch.fnmatch(page, pattern)


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 - the rest of MkDocs' arguments
    """Mark options in inline code, and cells of much text, for the style sheet."""
    return CELL.sub(_with_class, CODE.sub(_with_options, html))


def _with_options(code: re.Match[str]) -> str:
    if code[0].startswith("<pre"):
        return code[0]
    return OPTION.sub(r'<span class="option">\g<0></span>', code[0])


def _with_class(cell: re.Match[str]) -> str:
    is_long = len(TAG.sub("", cell[1])) > MAX_SHORT_CELL
    return f'<td class="text">{cell[1]}</td>' if is_long else cell[0]


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Add the scripts that draw diagrams to the pages that have some."""
    if 'class="mermaid"' not in output:
        return output
    scripts = "".join(
        f'<script src="{get_relative_url(script, page.url)}"></script>' for script in DRAWING
    )
    return output.replace("</head>", f"{scripts}</head>", 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Take the addresses of other hosts out of the theme's script."""
    for path in Path(config.site_dir).glob("assets/javascripts/bundle.*.js"):
        path.write_text(path.read_text().replace(REMOTE, "about:blank#"))
