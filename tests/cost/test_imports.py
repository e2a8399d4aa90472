"""A prediction starts at once: nothing heavy is imported for it."""

import subprocess
import sys

import pytest

HEAVY = ("polars", "duckdb", "jax", "jaxlib", "torch", "numpy", "rich", "typer")
PREDICTION = "memory", "meshscope_engine", "pipeline", "planned", "prediction", "vllm_engine"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (["analysis.totals", "model.config", *(f"cost.{name}" for name in PREDICTION)], False),
        (["events.schema"], True),  # the check sees a heavy import
    ],
    ids=["prediction", "tables"],
)
def test_a_prediction_loads_no_table_library_and_no_framework(modules, heavy) -> None:
    imports = ", ".join(f"meshscope.{module}" for module in modules)
    script = f"import {imports}, sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    reply = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ("polars" in reply.stdout) is heavy
    assert heavy or not reply.stdout.split()
