"""The layers hold, and commands that need no accelerator start without the libraries of one."""

import subprocess
import sys

import pytest

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
    ["meshscope", "meshscope.cli.main", "meshscope.prediction", "meshscope.spec.experiment"],
)
def test_import_loads_nothing_slow(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(SLOW_TO_IMPORT)


@pytest.mark.parametrize("module", ["meshscope.readers.hlo.collectives", "meshscope.analysis.join"])
def test_readers_and_metrics_load_no_framework(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(FRAMEWORKS)


def test_the_check_sees_an_import() -> None:
    """The two tests above can fail: a module that is imported is seen."""
    assert "numpy" in imported_by("import numpy")
