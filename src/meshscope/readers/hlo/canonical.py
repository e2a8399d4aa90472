"""A hash of HLO text that only a change of the program changes: not names, source lines or their tables."""

import gzip
import hashlib
import re
from pathlib import Path

_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_NAME = re.compile(r"%[\w.\-]+")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%", re.MULTILINE)


def canonical_hash(path: Path) -> str:
    """The hash of a program: instructions in their order, layouts, algorithms and estimates."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return hashlib.sha256(canonical_text(file.read()).encode()).hexdigest()


def canonical_text(text: str) -> str:
    """The computations without metadata, with names numbered in the order of their first use."""
    first = _COMPUTATION.search(text)
    body = _METADATA.sub("", text[first.start() :] if first else text)
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), body)
