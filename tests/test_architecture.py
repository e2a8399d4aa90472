"""The layers hold, and commands that need no accelerator start without the libraries of one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FRAMEWORKS = ("jax", "jaxlib", "torch", "torch_xla", "libtpu")
SLOW_TO_IMPORT = (*FRAMEWORKS, "polars", "duckdb", "numpy")


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["meshscope", "meshscope.cli", "meshscope.cost.collectives", "meshscope.plans.experiment"],
)
def test_import_loads_nothing_slow(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(SLOW_TO_IMPORT)


@pytest.mark.parametrize("module", ["meshscope.readers.hlo.collectives", "meshscope.analysis.join"])
def test_readers_and_metrics_load_no_framework(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(FRAMEWORKS)


def test_only_the_tests_of_the_command_line_import_it() -> None:
    """Everything else uses the API; inside the package an import contract checks it."""
    files = [
        p
        for d in ("experiments", "benchmarks", "docs", "tools")
        for p in Path(ROOT, d).rglob("*")
        if p.suffix in {".py", ".md"}
    ]
    assert files
    assert [p.name for p in files if "meshscope.cli" in p.read_text(encoding="utf-8")] == []


def test_the_check_sees_an_import() -> None:
    """The two tests above can fail: a module that is imported is seen."""
    assert "numpy" in imported_by("import numpy")


def test_the_architecture_page_lists_the_layers_of_the_import_contract() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page[page.index("<!-- layers -->") : page.index("<!-- end -->")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [re.findall(r"`(\w+)`", row) for row in rows] == [
        [name.strip() for name in layer.split("|")] for layer in layers
    ]
