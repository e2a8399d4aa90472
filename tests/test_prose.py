"""Code and pages are in plain US English, and names say what they hold."""

import re
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from tables import table


def _load() -> ModuleType:
    spec = spec_from_file_location("prose", Path(__file__).with_name("prose.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = _load()
FILES = prose.files(".py", ".md")


def test_no_file_has_unidiomatic_prose_or_empty_names() -> None:
    findings = [str(finding) for path in FILES for finding in prose.findings_in(path)]
    assert findings == []


@table
def test_the_check_finds(line: str, text: str, tmp_path: Path) -> None:
    """Each kind of finding is found, so the test above can fail."""
    path = tmp_path / "module.py"
    path.write_text(line + "\n", encoding="utf-8")
    assert [finding.text for finding in prose.findings_in(path)] == [text]


def test_no_two_classes_share_a_name() -> None:
    src = (path for path in FILES if path.is_relative_to(prose.ROOT / "src"))
    names = Counter(
        name
        for path in src
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:]", path.read_text("utf-8"), re.MULTILINE)
    )
    assert [name for name, n in names.items() if n > 1] == []


def test_the_glossary_defines_each_term_once() -> None:
    page = (prose.ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    terms = [t.strip() for row in rows if set(row) != {"-"} for t in row.split(",")]
    repeated = {term for term, n in Counter(terms).items() if n > 1}
    assert repeated <= {"term"}
