"""`export`: every form from the command line, beside the run or where asked."""

from pathlib import Path

import pytest

OUTPUTS = {
    "perfetto": "a.perfetto.json.gz",
    "chrome": "a.trace.json.gz",
    "card": "a.card.yaml",
    "csv": "a.csv",
    "parquet": "a.parquet",
    "chakra": "a-chakra",
    "ccl-bench": "a-ccl-bench",
}


@pytest.mark.parametrize(("form", "name"), OUTPUTS.items())
def test_every_form_is_written_once(meshscope, here: Path, form: str, name: str) -> None:
    before, inside = {*here.iterdir()}, sorted(Path("a").rglob("*"))
    status, out, err = meshscope("export", "a", "--to", form)
    assert (status, out) == (0, "")
    assert err.startswith(f"wrote {name}")
    status, _, err = meshscope("export", "a", "--to", form)
    assert (status, "--force" in err) == (1, True)
    assert meshscope("export", "a", "--to", form, "--force").status == 0
    assert sorted(Path("a").rglob("*")) == inside
    assert {*here.iterdir()} - before == {here / name}
