"""The tables of docs/evidence/best-plans.md, printed from best-plans/cells.js by cog."""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "evidence" / "best-plans" / "cells.js"
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
THROUGHPUT = "throughput"


@cache
def cells() -> tuple[dict[str, Any], ...]:
    """The cells of the page."""
    text = DATA.read_text(encoding="utf-8")
    return tuple(json.loads(text[text.index("[") : text.rindex("]") + 1]))


def extent() -> None:
    """Prints how many models and cells there are, and how many programs were compiled."""
    known = [cell for cell in cells() if "options" in cell]
    compiled = [cell["compiled"]["verdict"] for cell in known if cell["compiled"]]
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(compiled).items()))
    n_models = len({cell["model"] for cell in cells()})
    sys.stdout.write(
        f"{n_models} models on {len(CHIPS)} generations, two goals: {len(cells())} cells, "
        f"{len(cells()) - len(known)} of them without a plan within the limits.\n"
    )
    sys.stdout.write(
        f"The communication of {len(compiled)} cells is compiled ({verdicts or 'none'}, compared with the prediction); "
        "that of the others is predicted only.\n"
    )


def table() -> None:
    """Prints slice, plan and throughput of every model by generation, for the goal throughput."""
    by_key = {(cell["model"], cell["chip"]): cell for cell in cells() if cell["goal"] == THROUGHPUT}
    for row in (("model", *CHIPS), ("---",) * (len(CHIPS) + 1)):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    for model in dict.fromkeys(cell["model"] for cell in cells()):
        texts = (_text(by_key[model, chip]) for chip in CHIPS)
        sys.stdout.write(f"| {model.rpartition('/')[2]} | {' | '.join(texts)} |\n")


def _text(cell: dict[str, Any]) -> str:
    if "options" not in cell:
        return "none"
    return f"{cell['chips']} x `{cell['options']['plan']}`, {cell['tokens_per_s_per_chip']:,.0f}"
