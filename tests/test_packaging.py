"""What an installation that is not this checkout needs is declared."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_that_is_not_python_is_package_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = settings["tool"]["setuptools"]["package-data"]
    package = ROOT / "src" / "meshscope"
    data = [
        path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    ]
    assert data
    left_out = [
        str(path.relative_to(package))
        for path in data
        if not any(
            fnmatch(path.name, pattern)
            for pattern in declared.get(
                ".".join(("meshscope", *path.relative_to(package).parent.parts)), []
            )
        )
    ]
    assert left_out == []
