"""A prediction starts at once: nothing heavy is imported for it."""

import subprocess
import sys

HEAVY = ("polars", "duckdb", "jax", "jaxlib", "torch", "numpy", "rich", "typer")


def _heavy_after(statement: str) -> list[str]:
    """Which of the heavy libraries a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    reply = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return reply.stdout.split()


def test_predict_loads_no_table_library_and_no_framework() -> None:
    rooms = ("analysis.totals", "model.config", "cost.prediction", "cost.memory")
    assert _heavy_after("import " + ", ".join(f"meshscope.{room}" for room in rooms)) == []


def test_the_check_sees_a_heavy_import() -> None:
    assert "polars" in _heavy_after("import meshscope.events.schema")
