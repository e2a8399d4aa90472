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

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "experiments", "docs", "tools")

# What to avoid, and what to write instead. Matched without regard to case.
TICS: dict[str, str] = {
    r"(?:^|[.;:] )of (?!course\b|the form\b)[a-z]+(?: [a-z]+){0,4}, ": "a fronted genitive: start with the subject",
    r"\b(?:is|are|was|were|be|been|being|not) told\b": "reported, printed, known, named",
    r"\btold (?:apart|by|of|as|in|above|below|before|besides)\b": "distinguished, reported",
    r"\btells? (?:of|nothing|it|its|what|which|that|how|where|whether|by)\b": "shows, says, reports",
    r"\banew\b": "again",
    r"\bnobody\b": "no one, or name the subject",
    r"\bsomebody(?: else)?\b": "another tool, another team",
    r"\bdearest\b": "costliest",
    r"\bmakings\b": "name the thing",
    r"\b(?:lies|lie|lay) (?:in|beside|below|above|within|inside|between|on|at|where|apart|ahead)\b": "is, are",
    r"\bstands? (?:in|beside|at|on|where|there|here|as|behind|before|below|above|alone)\b": "is, appears",
    r"\bcomes? (?:in|out) (?:into|of it)\b": "enters, leaves",
    r"\bhand-?overs?\b": "stage send",
    r"\bhand(?:s|ed)? (?:it |them )?on\b": "pass, send",
    r"\b(?:over )?the wires\b|\bover the wire\b": "over ICI, over DCN, the links",
    r"\bin place of\b": "instead of",
    r"\bby hand\b": "explicitly, manually",
    r"\bas (?:it|they) (?:stands?|lies?)\b": "as is",
    r"\bwhat (?:nothing hides|there is|is there)\b": "name it",
    r"\bthat there (?:is|are)\b": "that exist, or drop it",
    r"\bwhere (?:there (?:is|are) (?:one|none|some|no)|it has (?:one|none))\b": "if one exists, if there is none",
    r"\bcarri(?:es|ed) out (?:as|by)\b": "implemented as",
    r"\blaid out (?:again|otherwise)\b": "relayout",
    r"\bso as to\b": "to",
    r"\bwhereof\b|\bthereof\b|\bwherein\b|\btherein\b|\bhereby\b": "plain words",
    r"\bnot a few\b|\bnone but\b|\bnothing but\b|\ball but\b": "say how many, only",
    r"\bgoes? without\b": "needs no",
    r"\bmay not be had\b|\bto be had\b|\bcan be had\b": "available",
    r"\bought to\b": "should",
    r"\blets? go of\b": "frees",
    r"\bfor want of\b|\bin want of\b": "without",
    r"\bas (?:the )?usual\b": "name the default",
    r"\bis not to be\b|\bare not to be\b": "must not be",
    r"\bhow it came to be\b|\bcome to be\b|\bcomes to be\b": "how it was made",
}

UK_SPELLING: dict[str, str] = {
    r"colour": "color",
    r"\bgrey\b": "gray",
    r"modell(?:ed|ing)": "modeled, modeling",
    r"labell(?:ed(?!by)|ing)": "labeled, labeling",
    r"cancell(?:ed|ing)": "canceled, canceling",
    r"travell": "travel",
    r"neighbour": "neighbor",
    r"behaviour": "behavior",
    r"favour": "favor",
    r"honour": "honor",
    r"\bcentre": "center",
    r"catalogue": "catalog",
    r"\blicence": "license",
    r"\bartefact": "artifact",
    r"analys(?:e|ed|ing)\b": "analyze",
    r"(?:utili|seriali|optimi|initiali|normali|recogni|organi|summari|materiali|paralleli|quanti|minimi|maximi|synchroni|generali|visuali|tokeni|speciali|initiali|reali|vectori|factori|categori|penali|finali|locali|amorti|stabili|equali)s(?:e|ed|es|ing|ation|er)\b": "-ize",
}

# Names that say nothing of what they hold.
EMPTY_NAMES = frozenset({"told", "found", "own", "thing", "things", "stuff"})


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


def prose_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and string literals with at least two spaces, with their lines."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and token.string.count(" ") > 1:
            body = token.string.lstrip("rbfuRBFU").strip("\"'")
            for offset, line in enumerate(body.splitlines()):
                yield token.start[0] + offset, line.strip()


def prose_of_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Lines outside code blocks and generated blocks."""
    is_code = is_generated = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
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
    read = prose_of_python if path.suffix == ".py" else prose_of_markdown
    for number, line in read(path):
        for pattern, advice in (TICS | UK_SPELLING).items():
            if match := re.search(pattern, line, re.IGNORECASE):
                yield Finding(path=path, line=number, text=match[0], advice=advice)
    if path.suffix == ".py":
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
