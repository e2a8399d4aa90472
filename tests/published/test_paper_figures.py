"""The paper's figures redone: counts equal what it prints, and the CSV files are those that the command makes."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "paper_figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs the extra dev")
    sys.path.insert(0, str(SCRIPT.parent))  # it imports the style beside it
    return import_module("paper_figures")


@pytest.mark.parametrize("number", [4, 5])
def test_vllm_s_counts_and_bytes_are_those_that_the_paper_prints(figures, number) -> None:
    points = list(figures.FIGURES[number]())
    predicted, printed = (
        {(p.panel, p.x): p.value for p in points if p.series == series}
        for series in (figures.THEIRS, figures.PRINTED)
    )
    assert predicted == printed


def test_the_volumes_of_figure_6_are_those_of_docs_paper(figures: ModuleType) -> None:
    points = figures.FIGURES[6]()
    volumes = {(p.model, p.plan): p.value for p in points if p.series == figures.THEIRS}
    # docs/evidence/paper.md, "Derived volumes", in MB; formula (3) for hybrids adds other workers.
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 5, 6, 7, 8, 9, 10])
def test_a_figure_in_the_docs_is_what_the_command_makes(figures, number, tmp_path) -> None:
    """Counts and bytes are equal, times within 1 %, and the picture shows the stored data."""
    compare = import_module("matplotlib.testing.compare")
    stem = ROOT / "docs" / "evidence" / "figures" / f"figure-{number}"
    stored = figures.read_points(stem.with_suffix(".csv"))
    made = list(figures.FIGURES[number]())
    times = ("value", "low", "high")
    assert [replace(p, value=0, low=None, high=None) for p in stored] == [
        replace(p, value=0, low=None, high=None) for p in made
    ], "run 'make figures'"
    for old, new in zip(stored, made, strict=True):
        near = 0.01 if new.unit in {"s", "share"} else 0
        for name in times:
            value = getattr(new, name)
            assert getattr(old, name) == (value and pytest.approx(value, rel=near)), "make figures"
    figures.save_drawing(stored, tmp_path / stem.name)
    drawn = tmp_path / f"{stem.name}.png"
    assert compare.compare_images(str(stem.with_suffix(".png")), str(drawn), tol=1) is None
    assert stem.with_suffix(".svg").is_file()


def test_the_page_states_what_the_figures_show(figures: ModuleType) -> None:
    """The shares of figure 1, and the orders of figures 8 and 10."""
    page = (ROOT / "docs" / "evidence" / "figures.md").read_text(encoding="utf-8")
    shares = {(p.plan, p.series): f"{100 * p.value:.0f} %" for p in figures.FIGURES[1]()}
    two, four = (shares[plan, "exposed over tp"] for plan in ("tp=2", "tp=4"))
    assert f"spends {two} (two chips) to {four} (four chips) of the request" in page
    two, four = (shares[plan, "waiting for stages"] for plan in ("pp=2", "pp=4"))
    assert f"but {two} (`pp=2`) to {four} (`pp=4`) of the request waiting" in page
    for number, order in {
        8: ["tp=4", "tp=8", "tp=2"],
        10: ["tp=8", "pp=2,tp=4", "pp=4,tp=2", "pp=8"],
    }.items():
        e2e = {
            p.plan: p.value
            for p in figures.FIGURES[number]()
            if p.panel == "e2e" and p.series == figures.OURS
        }
        assert sorted(e2e, key=e2e.__getitem__) == order
