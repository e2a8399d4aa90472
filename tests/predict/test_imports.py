"""A prediction starts at once: nothing heavy is imported for it."""

import pkgutil
import subprocess
import sys

import meshscope.cost.prediction

HEAVY = ("polars", "duckdb", "jax", "jaxlib", "torch", "numpy", "rich", "typer")


def _heavy_after(statement: str) -> list[str]:
    """Which of the heavy libraries a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    reply = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return reply.stdout.split()


def test_predict_loads_no_table_library_and_no_framework() -> None:
    modules = [
        f"meshscope.prediction.{module.name}"
        for module in pkgutil.iter_modules(meshscope.prediction.__path__)
    ]
    assert len(modules) >= 5
    statement = "import meshscope.analysis.totals, meshscope.model.config, " + ", ".join(modules)
    assert _heavy_after(statement) == []


def test_the_check_sees_a_heavy_import() -> None:
    assert "polars" in _heavy_after("import meshscope.events.schema")
