"""The matrix of docs/evidence/compilers.md is what its compilers make."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from meshscope.api.environments import list_compilers
from meshscope.model.catalog import catalog

ROOT = Path(__file__).parents[1]
REBUILT = "Qwen/Qwen2.5-0.5B"
NEAR = 1e-9


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


@pytest.fixture
def tables() -> ModuleType:
    return import_module("compiler_tables")


def test_each_cell_is_there_once_and_names_its_versions(tables: ModuleType) -> None:
    cells = tables.stored_cells()
    keys = [(cell["model"], cell["compiler"]) for cell in cells]
    assert len(keys) == len(set(keys))
    known = {c["compiler"]: {"jax": c["jax"], "libtpu": c["libtpu"]} for c in list_compilers()}
    for cell in cells:
        assert cell["model"] in catalog()
        assert cell.get("versions", known[cell["compiler"]]) == known[cell["compiler"]]


def test_the_page_compares_a_model_of_most_families(tables: ModuleType) -> None:
    experiment = import_module("compilers")
    assert tables.COMPILERS == experiment.COMPILERS
    families = {cells[tables.COMPILERS[0]]["family"] for cells in tables.compared().values()}
    assert len(families) >= 12


@pytest.mark.slow
@pytest.mark.tpu
def test_a_cell_is_what_the_compiler_of_the_tests_makes(tables: ModuleType) -> None:
    (name,) = (c["compiler"] for c in list_compilers() if c["is_own"])
    stored = tables.compared()[REBUILT][name]
    made = import_module("compilers").cell_of(REBUILT, name)
    for phase, values in made["phases"].items():
        expected = stored["phases"].pop(phase)
        assert values.pop("step_s") == pytest.approx(expected.pop("step_s"), rel=NEAR)
        assert values.pop("exposed_s") == pytest.approx(expected.pop("exposed_s"), rel=NEAR)
        for group in values["collectives"]:
            group["shape"] = list(group["shape"])
        assert values == expected
    assert made["memory"] == stored["memory"]
