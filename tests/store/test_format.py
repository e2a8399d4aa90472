"""The policy of docs/data.md: within a schema, later versions read what earlier versions wrote."""

import re
from pathlib import Path

from meshscope.events.enums import Phase, Source
from meshscope.events.schema import SCHEMA_VERSION
from meshscope.store.read import read_events, read_run

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "golden" / "run"


def test_a_recorded_run_of_this_schema_is_read() -> None:
    run = read_run(RECORDED)
    assert run.manifest.experiment.model_name == "Qwen/Qwen3-4B"
    assert run.manifest.phases == (Phase.PREFILL, Phase.DECODE)
    assert run.sources == (Source.PREDICTED,)
    # embedding, two layers of attention and MLP, and the logits, in two phases
    assert sum(row.count for row in run.rows) == 2 * (1 + 2 * 2 + 1)
    assert {time.phase for time in run.times} == set(run.manifest.phases)
    assert run.memory[Source.PREDICTED].weights_bytes > 0


def test_the_recorded_run_has_the_columns_of_the_page() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| \w", page, re.MULTILINE)
    assert set(read_events(RECORDED).columns) <= set(documented)


def test_the_page_names_the_schema() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert f"writes and reads schema {SCHEMA_VERSION}." in page


def test_the_page_lists_the_files_of_a_run() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    files = {path.name for path in RECORDED.iterdir()} - {"README.md"}
    assert [name for name in files if f"| `{name}` |" not in page] == []
