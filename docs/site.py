"""Hooks of mkdocs: the pages at the top of the repository join the site, and links work in both places.

Markdown here is written as GitHub shows it; python-markdown needs an empty line before a list.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

# Pages at the top of the repository, by their names on the site.
TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}

_MARKERS = re.compile(r"<!-- (?:\[\[\[cog.*?\]\]\]|\[\[\[end\]\]\]|layers|end) -->\n?", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_LIST_AFTER_TEXT = re.compile(
    r"^(?P<text>(?![-*] |\d+\. |[ #|]).*\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE
)
_TABLE_AFTER_TEXT = re.compile(r"^(?P<text>[^|\n].*)\n(?=\|)", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages at the top of the repository, and the license."""
    for name, page in TOP.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "LICENSE.txt", abs_src_path=str(ROOT / "LICENSE")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page without cog's markers, with links of the site and empty lines before lists."""
    is_top = page.file.src_uri in TOP.values()
    return site_markdown(markdown, is_top=is_top)


def site_markdown(markdown: str, *, is_top: bool) -> str:
    """The Markdown of a page for the site; `is_top` if the page is at the top of the repository."""
    blocks = _FENCE.split(_MARKERS.sub("", markdown))
    return "".join(
        block if block.startswith("```") else _prose(block, is_top=is_top) for block in blocks
    )


def _prose(text: str, *, is_top: bool) -> str:
    linked = _LINK.sub(lambda m: _link(m["target"], is_top=is_top) + (m["anchor"] or ""), text)
    separated = _LIST_AFTER_TEXT.sub(r"\g<text>\n\n", linked)
    return _TABLE_AFTER_TEXT.sub(r"\g<text>\n\n", separated)


def _link(target: str, *, is_top: bool) -> str:
    """The target of a link on the site; addresses of other hosts stay as they are."""
    if ":" in target:
        return target
    from_top = target if is_top else target.removeprefix("../") if "../" in target else None
    if from_top is None:
        return target
    if from_top == "LICENSE":
        return "LICENSE.txt"
    return TOP.get(from_top, from_top.removeprefix("docs/"))
