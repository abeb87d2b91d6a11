"""The site builds without a warning, has every page, and a reader's browser fetches nothing."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from worlds.waiting import completed

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
LOADING = {"stylesheet", "preconnect", "preload", "prefetch", "icon", "modulepreload", "manifest"}
REMOTE = re.compile(r"^(?:https?:)?//")
IN_CSS = re.compile(r"(?:@import\s+[\"']?|url\(\s*[\"']?)(?:https?:)?//[^\s\"')]+")


class Loads(HTMLParser):
    """The addresses that a page makes a browser load by itself, and those that it links to."""

    def __init__(self):
        super().__init__()
        self.loads, self.links, self.styles = [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loads += [
            given[name] for name in ("src", "srcset", "poster", "data") if given.get(name)
        ]
        if tag == "link" and LOADING & set((given.get("rel") or "").split()):
            self.loads.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        self.styles.append(given.get("style") or "")

    def handle_data(self, data):
        if self.lasttag == "style":
            self.styles.append(data)


def read(html):
    page = Loads()
    page.feed(html)
    return page


def remote(page):
    """The addresses of other hosts from which a page loads something."""
    return [each for each in page.loads if REMOTE.match(each)] + IN_CSS.findall(
        "\n".join(page.styles)
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("material", reason="pip install -c constraints.txt -e '.[docs]'")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = completed(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target, done.stderr


@pytest.mark.ci_more
def test_the_site_builds_strictly_and_lists_every_page(built):
    target, said = built
    assert "not included in the" not in said
    pages = sorted((ROOT / "docs").rglob("*.md"))
    missing = [
        page.name
        for page in pages
        if not (target / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    ]
    assert pages
    assert not missing


@pytest.mark.ci_more
def test_a_browser_fetches_nothing_from_elsewhere(built):
    target, _ = built
    pages = {path: remote(read(path.read_text())) for path in target.rglob("*.html")}
    styles = {path: IN_CSS.findall(path.read_text()) for path in target.rglob("*.css")}
    assert pages
    assert styles
    assert not {path.name: found for path, found in (pages | styles).items() if found}
    scripts = target.glob("assets/javascripts/*.js")
    assert not [path.name for path in scripts if "unpkg.com" in path.read_text()]


@pytest.mark.ci_more
def test_pages_with_diagrams_bring_the_scripts_that_draw_them(built):
    target, _ = built
    pages = [path for path in target.rglob("*.html") if 'class="mermaid"' in path.read_text()]
    assert target / "architecture.html" in pages
    for path in pages:
        loads = read(path.read_text()).loads
        drawing = [each for each in loads if each.endswith(("mermaid.min.js", "diagrams.js"))]
        assert len(drawing) == 2
        assert "mermaid" in drawing[0], "the second script changes the first"
        assert all((path.parent / unquote(script)).is_file() for script in drawing)


@pytest.mark.ci_more
def test_an_option_in_inline_code_is_marked_and_code_blocks_are_left_alone(built):
    target, _ = built
    page = (target / "how-to" / "run-behind-nat.html").read_text()
    marked = '<span class="option">--no-listen</span>'
    assert f"{marked}</code>" in page
    assert not [block for block in re.findall(r"(?s)<pre.*?</pre>", page) if marked in block]


def test_something_remote_would_be_found():
    page = read(
        '<link rel="stylesheet" href="https://a.example/x.css"><img src="//b.example/y.png">'
        "<style>@import url(https://c.example/z.css)</style><a href='https://d.example'>no</a>"
    )
    assert len(remote(page)) == 3
    assert not remote(read('<link rel="canonical" href="https://a.example"><img src="a.png">'))
