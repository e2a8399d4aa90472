"""Hooks of mkdocs: the pages at the top of the repository join the site, and links work in both places.

Markdown here is written as GitHub shows it; python-markdown needs an empty line before a list.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
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
    uri = page.file.src_uri
    return site_markdown(markdown, "" if uri in TOP.values() else f"docs/{dirname(uri)}")


def on_page_content(html: str, **_: Any) -> str:
    """The page with a link to the pages of `make explorers`, which are no pages of mkdocs."""
    return html.replace("<code>explore/</code>", '<a href="explore/index.html">explore/</a>')


def on_post_build(config: Any) -> None:
    """Writes llms.txt, the index of the pages for language models, with the first sentence of each."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        ((title, pages),) = section.items()
        lines += [f"## {title}", ""]
        lines += [
            _entry(page if isinstance(page, str) else next(iter(page.values()))) for page in pages
        ]
        lines.append("")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _entry(page: str) -> str:
    """`- [title](page.html): first sentence`."""
    names = {on_site: ROOT / name for name, on_site in TOP.items()}
    text = names.get(page, ROOT / "docs" / page).read_text(encoding="utf-8")
    heading, *rest = (line for line in text.splitlines() if line.strip())
    first = next(line for line in rest if line[0].isalpha() or line.startswith("**"))
    sentence = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first).split(". ")[0].strip("*")
    return f"- [{heading.lstrip('# ')}]({page.removesuffix('.md')}.html): {sentence.rstrip('.')}."


def site_markdown(markdown: str, folder: str) -> str:
    """The Markdown of a page for the site; `folder` is its folder in the repository."""
    blocks = _FENCE.split(_MARKERS.sub("", markdown))
    return "".join(block if block.startswith("```") else _prose(block, folder) for block in blocks)


def _prose(text: str, folder: str) -> str:
    linked = _LINK.sub(lambda m: _link(m["target"], folder) + (m["anchor"] or ""), text)
    separated = _LIST_AFTER_TEXT.sub(r"\g<text>\n\n", linked)
    return _TABLE_AFTER_TEXT.sub(r"\g<text>\n\n", separated)


def _link(target: str, folder: str) -> str:
    """The target of a link on the site; addresses of other hosts stay as they are."""
    if ":" in target:
        return target
    path = normpath(join(folder, target))
    on_site = "LICENSE.txt" if path == "LICENSE" else TOP.get(path, path.removeprefix("docs/"))
    return relpath(on_site, folder.removeprefix("docs").lstrip("/") or ".")
