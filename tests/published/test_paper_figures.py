"""The paper's figures redone: counts equal what it prints, and the CSV files are those that the command makes."""

import csv
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "paper_figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    spec = importlib.util.spec_from_file_location("paper_figures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [4, 5])
def test_vllm_s_counts_and_bytes_are_those_that_the_paper_prints(
    figures: ModuleType, number: int
) -> None:
    points = list(figures.FIGURES[number]())
    predicted, printed = (
        {(p.panel, p.x): p.value for p in points if p.series == series}
        for series in (figures.THEIRS, figures.PRINTED)
    )
    assert predicted == printed


def test_the_volumes_of_figure_6_are_those_of_docs_paper(figures: ModuleType) -> None:
    points = figures.FIGURES[6]()
    volumes = {(p.model, p.plan): p.value for p in points if p.series == figures.THEIRS}
    # docs/paper.md, "Derived volumes", in MB; formula (3) for hybrids adds other workers.
    for (model, plan), megabytes in {
        ("Llama-3.2-3B", "tp=4"): 142.2,
        ("Llama-3.1-8B", "tp=4"): 211.9,
        ("Llama-2-13b", "tp=4"): 319.3,
        ("Llama-3.2-3B", "pp=4"): 9.4,
        ("Llama-3.1-8B", "pp=4"): 12.5,
        ("Llama-2-13b", "pp=4"): 15.7,
    }.items():
        assert volumes[model, plan] / 1e6 == pytest.approx(megabytes, abs=0.05)


def test_the_shares_of_figure_1_sum_to_one(figures: ModuleType) -> None:
    points = list(figures.FIGURES[1]())
    for plan in {p.x for p in points}:
        assert sum(p.value for p in points if p.x == plan) == pytest.approx(1)


def _exact(rows: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Counts and bytes; times move with the model of time, by less than their intervals."""
    names = ("panel", "model", "plan", "series", "x", "value")
    return [
        tuple(str(float(row[n])) if n == "value" else row[n] for n in names)
        for row in rows
        if row["unit"] in {"count", "B"}
    ]


def test_every_figure_is_in_the_docs_with_its_data(figures: ModuleType) -> None:
    for number in figures.FIGURES:
        stem = ROOT / "docs" / "figures" / f"figure-{number}"
        assert stem.with_suffix(".png").stat().st_size < 200_000
        assert stem.with_suffix(".svg").is_file()
        with stem.with_suffix(".csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        made = list(figures.FIGURES[number]())
        assert _exact(rows) == _exact(map(figures.asdict, made)), "run experiments/paper_figures.py"
        assert len(rows) == len(made)
        assert all(row["basis"].startswith(("predicted", "the paper")) for row in rows)
