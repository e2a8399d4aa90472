"""The patterns that keep unidiomatic prose out of the code and the pages, and the reader that finds it.

`python tests/prose.py [PATH ...]` lists every match with its suggestion.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "experiments", "docs", "tools")

# What to avoid, as regular expressions, and what to write instead.
PATTERNS: dict[str, str] = {
    pattern: advice
    for patterns in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).values()
    for pattern, advice in patterns.items()
}

# Names that say nothing of what they hold.
EMPTY_NAMES = frozenset({"told", "found", "own", "thing", "things", "stuff"})
_EMPTY_NAME = re.compile(rf"\b(?:{'|'.join(EMPTY_NAMES)})\b")


def _anywhere(pattern: str) -> re.Pattern[str]:
    """What a lower-case file has if a line of it matches, which may start after code, quotes or a number sign.

    Without the bounds of words, which Python looks for at each character, it takes a quarter of the time.
    """
    loose = pattern if "(?!" in pattern else pattern.replace(r"\b", "")
    return re.compile(loose.replace("^", r"^\W*|[\"'#] *"), re.MULTILINE)


_ANYWHERE = {pattern: _anywhere(pattern) for pattern in PATTERNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A match: where it is, the text, and what to write instead."""

    path: Path
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: '{self.text.strip()}': {self.advice}"


def files(*suffixes: str) -> list[Path]:
    """Every checked file of the project with one of these suffixes."""
    tops = ROOT.glob("*.md")
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = {path for path in (*tops, *inside) if path.suffix in suffixes and path.is_file()}
    return sorted(
        path
        for path in paths
        if path.stem not in {"prose", "test_prose"} and "egg-info" not in str(path)
    )


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and string literals with at least two spaces, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and token.string.count(" ") > 1:
            body = token.string.lstrip("rbfuRBFU").strip("\"'")
            for offset, line in enumerate(body.splitlines()):
                yield token.start[0] + offset, line.strip()


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside code blocks and generated blocks."""
    is_code = is_generated = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            is_code = not is_code
        elif "[[[cog" in line:
            is_generated = True
        elif "[[[end]]]" in line:
            is_generated = False
        elif not is_code and not is_generated:
            yield number, line.strip("- *|#")


def findings_in(path: Path) -> Iterator[Finding]:
    """The matches in one file, in the order of its lines."""
    text = path.read_text(encoding="utf-8")
    read = prose_of_python if path.suffix == ".py" else prose_of_markdown
    # The whole text is searched first, as few files have any suspect to look at line by line.
    lower = text.lower()
    suspects = {p: advice for p, advice in PATTERNS.items() if _ANYWHERE[p].search(lower)}
    for number, line in read(text) if suspects else ():
        for pattern, advice in suspects.items():
            if match := re.search(pattern, line, re.IGNORECASE):
                yield Finding(path=path, line=number, text=match[0], advice=advice)
    if path.suffix == ".py" and _EMPTY_NAME.search(text):
        yield from empty_names_in(path)


def empty_names_in(path: Path) -> Iterator[Finding]:
    """Variables, parameters and functions whose name says nothing."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name)
            ):
                if name in EMPTY_NAMES:
                    yield Finding(
                        path=path, line=node.lineno, text=name, advice="say what it holds"
                    )
            case _:
                pass


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]]
    checked = [
        path
        for path in files(".py", ".md")
        if not chosen or any(path.is_relative_to(root) for root in chosen)
    ]
    for finding in (finding for path in checked for finding in findings_in(path)):
        sys.stdout.write(f"{finding}\n")
