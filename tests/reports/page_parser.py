"""Parses a report without a browser: elements, texts, tables and chart data."""

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page in order, its texts, tables, scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.banners = ""  # the text of all warnings
        self._is_banner = False
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_banner = (dict(attrs).get("class") or "").startswith("banner")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in {"td", "th"}:
            self.tables[-1][-1].append("")
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_banner = False
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside in self.raw:
            self.raw[inside][-1] += data
            return
        self.texts.append(data)
        if self._is_banner:
            self.banners += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """The data of the charts."""
        scripts = [attrs for tag, attrs in self.elements if tag == "script"]
        place = next(i for i, a in enumerate(scripts) if a.get("type") == "application/json")
        return json.loads(self.raw["script"][place])

    @property
    def text(self) -> str:
        """The visible text with whitespace collapsed."""
        return " ".join(" ".join(self.texts).split())

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element with this tag."""
        return [attrs for name, attrs in self.elements if name == tag]
