"""The documentation site builds without a warning, reaches every page, and asks no other host for anything."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from tables import table

ROOT = Path(__file__).parents[1]

# Attributes that a browser fetches by itself; a link that a reader clicks is none of them.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}
HOST = re.compile(r"(?:https?:)?//")
STYLE_URL = re.compile(r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^)\"']+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


class Fetches(HTMLParser):
    """Collects the addresses on other hosts that a page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value
            for name, value in attrs
            if value is not None and (tag, name) in FETCHED and HOST.match(value)
        ]


def fetched_by(text: str) -> list[str]:
    page = Fetches()
    page.feed(text)
    return page.addresses + STYLE_URL.findall(text)


def test_every_page_is_on_the_site(site: Path) -> None:
    """With `omitted_files: warn`, a page outside the navigation fails the strict build."""
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.stem for path in site.rglob("*.html")}
    assert (site / "index.html").is_file()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "omitted_files: warn" in settings


def test_no_page_asks_another_host(site: Path) -> None:
    files = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert files
    fetched = {str(path): fetched_by(path.read_text(encoding="utf-8")) for path in files}
    assert {path: addresses for path, addresses in fetched.items() if addresses} == {}


def test_no_page_loads_what_the_theme_fetches_on_demand(site: Path) -> None:
    """The script of the theme fetches Mermaid, and figures of a repository, for pages that use them."""
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert not any('class="mermaid"' in text or "md-source__" in text for text in texts)


def test_markers_of_generated_blocks_are_not_on_the_site(site: Path) -> None:
    assert [p.name for p in site.rglob("*.html") if "[[[cog" in p.read_text("utf-8")] == []


def test_every_fence_is_a_code_block(site: Path) -> None:
    """A fence that is not understood stays text, and takes what follows into its block."""
    assert [p.name for p in site.rglob("*.html") if "```" in p.read_text("utf-8")] == []


@table
def test_the_check_sees_a_request(text: str) -> None:
    assert len(fetched_by(text)) == 1
    assert fetched_by('<a href="https://a.example">a link</a>') == []


def _hooks() -> ModuleType:
    spec = spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@table
def test_pages_are_rewritten_for_the_site(markdown: str, folder: str, expected: str) -> None:
    assert _hooks().site_markdown(markdown, folder) == expected
