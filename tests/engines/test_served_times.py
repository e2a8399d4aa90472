"""Steps of served models: the engines' own programs against published times."""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from engine_tables import SGLANG_MAIN, served_errors  # the tables of docs/evidence/engines.md


def test_steps_of_sglang_jax_are_within_fifteen_percent() -> None:
    """Prefill and decode of Qwen3-8B on one v6e and on four."""
    errors = [abs(error) for error in served_errors(SGLANG_MAIN)]
    assert median(errors) < 0.10
    assert max(errors) < 0.15
