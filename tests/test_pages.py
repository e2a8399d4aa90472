"""The data of pages follow from the present code, and the site that shows them builds without asking another host."""

import csv
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from tables import table

import meshscope
from meshscope.cost.collectives import predict
from meshscope.model.families import Family
from meshscope.model.quantization import PARTIAL_COVERAGES, WEIGHT_DTYPES, quantization_of
from meshscope.plans.program import Partitioner
from meshscope.units import format_dtype

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "program", sorted(path.stem for path in (ROOT / "experiments").glob("*.py"))
)
def test_programs_of_experiments_can_be_imported(program, monkeypatch) -> None:
    """A function that moved may not leave data in docs/ that no command makes again."""
    pytest.importorskip("matplotlib", reason="needs the extra dev")
    for folder in ("docs", "experiments"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import_module(program)


@pytest.mark.parametrize(
    ("study", "folder"), [("moe", "moe"), ("overlap", "moe"), ("fsdp", "fsdp")]
)
def test_compiled_layers_send_what_is_predicted(study, folder, monkeypatch) -> None:
    """docs/evidence/moe and docs/evidence/fsdp: the conditions are those of the YAML file, the bytes those of `predict`.

    Collectives of the auto partitioner are its own. A small table of counts may be compiled as an
    all-reduce. Some ways are those of earlier commits, as overlap.yaml and the page say.
    """
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    results, cases = import_module("results"), import_module("cases")
    table = results.read_table(ROOT / "docs" / "evidence" / folder / results.CASES)
    stored = {results.key_of(row): row for row in table if row["study"] == study}
    for case in cases.cases_of(ROOT / "experiments" / f"{study}.yaml"):
        row = stored.pop(tuple(results.identity_of(case).values()))
        conditions = results.conditions_of(case)
        assert {name: row[name] for name in conditions} == {
            name: str(value) for name, value in conditions.items()
        }
        if not row["refused"] and case.experiment.program.partitioner is Partitioner.MANUAL:
            rows = [one for one in predict(case.experiment) if one.phase is case.phase]
            sent = round(sum(one.count * one.wire_bytes for one in rows))
            compiled = int(row["moe_wire_bytes"]) + int(row["other_wire_bytes"])
            assert sent == pytest.approx(compiled, rel=2e-4)
    gone = {"capacity 2, async, before", "auto one_hot_pinned 2", "auto gathered"}
    assert {key[-1] for key in stored} <= gone


@pytest.mark.slow
def test_jax_s_programs_beside_torchxla_send_what_is_predicted() -> None:
    """docs/evidence/torchxla/compared.csv; collectives of the auto partitioner are its own.

    With ep, the program of 2026-11-22 gathers a table of counts that later ones all-reduce: 1.4 % of a decode step.
    """
    with (ROOT / "docs" / "evidence" / "torchxla" / "compared.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["partitioner"] == "manual"]
    assert len(rows) == 20
    for row in rows:
        run = meshscope.predict(
            row["model"], topology="v6e-8", plan=row["plan"], batch=8, prompt=1024, output=128
        )
        total = run.as_dict()["totals"][row["phase"]]
        assert total["count"] == int(row["jax_count"])
        near = 0.015 if "ep=" in row["plan"] else 0
        assert total["wire_bytes"] == pytest.approx(int(row["jax_wire_bytes"]), rel=near)


@pytest.mark.slow
def test_pictures_show_their_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compare = pytest.importorskip("matplotlib.testing.compare", reason="needs the extra dev")
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import_module("plots").write(tmp_path)
    for drawn in sorted(tmp_path.glob("*.png")):
        stored = ROOT / "docs" / "evidence" / "moe" / drawn.name
        assert compare.compare_images(str(stored), str(drawn), tol=1) is None, "run 'make figures'"


def test_the_page_of_formats_names_every_format_of_programs() -> None:
    page = (ROOT / "docs/formats.md").read_text("utf-8")
    formats = [dtype for dtype in WEIGHT_DTYPES if quantization_of(dtype) is not None]
    missing = [name for name in map(format_dtype, formats) if f"`{name}`" not in page]
    parts = [name.partition(f"_{of}") for name in missing for of in PARTIAL_COVERAGES if of in name]
    assert len(parts) == len(missing)
    assert [
        base
        for base, end, _ in parts
        if not {f"`{base}`", f"`{end}`"} <= {*re.findall(r"`.*?`", page)}
    ] == []


def test_the_support_table_has_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    support = import_module("support")
    assert {*support.FAMILY_NAMES, "ministral"} == set(Family)  # one row with Mistral


def test_the_support_table_distinguishes_programs(monkeypatch, capsys) -> None:
    """A dense model has no experts to place, annotations no stages; TorchXLA neither pp nor cp of DeepSeek-V4."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import_module("support").families()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    (dense,) = (row for row in rows if "Qwen2" in row[0])
    (gpt_oss,) = (row for row in rows if "gpt-oss" in row[0])
    assert "ep" not in dense[1]
    assert "ep" in gpt_oss[1]
    assert "pp" not in gpt_oss[2]
    (deepseek_v4,) = (row for row in rows if row[0].endswith("DeepSeek-V4"))
    assert "pp" in deepseek_v4[1].split()
    assert "pp" not in deepseek_v4[2].split()
    assert deepseek_v4[3].removesuffix(" |").split() == ["tp", "sp", "dp", "fsdp", "ep"]


# Attributes that a browser fetches by itself; a link that a reader clicks is none of them.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}
HOST = re.compile(r"(?:https?:)?//")
STYLE_URL = re.compile(r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^)\"']+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


class Fetches(HTMLParser):
    """Collects the addresses on other hosts that a page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value
            for name, value in attrs
            if value is not None and (tag, name) in FETCHED and HOST.match(value)
        ]


def fetched_by(text: str) -> list[str]:
    page = Fetches()
    page.feed(text)
    return page.addresses + STYLE_URL.findall(text)


def test_every_page_is_on_the_site(site: Path) -> None:
    """With `omitted_files: warn`, a page outside the navigation fails the strict build."""
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.stem for path in site.rglob("*.html")}
    assert (site / "index.html").is_file()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "omitted_files: warn" in settings


def test_language_models_find_every_page_of_the_menu(site: Path) -> None:
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line.startswith("- [")]
    assert len(entries) >= 20
    for line in entries:
        target, _, sentence = line.partition("](")[2].partition("): ")
        assert (site / target).is_file()
        assert len(sentence) > 15


def test_no_page_asks_another_host(site: Path) -> None:
    files = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert files
    fetched = {str(path): fetched_by(path.read_text(encoding="utf-8")) for path in files}
    assert {path: addresses for path, addresses in fetched.items() if addresses} == {}


def test_no_page_loads_what_the_theme_fetches_on_demand(site: Path) -> None:
    """The script of the theme fetches Mermaid, and figures of a repository, for pages that use them."""
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert not any('class="mermaid"' in text or "md-source__" in text for text in texts)


def test_markers_of_generated_blocks_are_not_on_the_site(site: Path) -> None:
    assert [p.name for p in site.rglob("*.html") if "[[[cog" in p.read_text("utf-8")] == []


def test_every_fence_is_a_code_block(site: Path) -> None:
    """A fence that is not understood stays text, and takes what follows into its block."""
    assert [p.name for p in site.rglob("*.html") if "```" in p.read_text("utf-8")] == []


@table
def test_the_check_sees_a_request(text: str) -> None:
    assert len(fetched_by(text)) == 1
    assert fetched_by('<a href="https://a.example">a link</a>') == []


def _hooks() -> ModuleType:
    spec = spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@table
def test_pages_are_rewritten_for_the_site(markdown: str, folder: str, expected: str) -> None:
    assert _hooks().site_markdown(markdown, folder) == expected
