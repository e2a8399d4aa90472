"""The page as a document: complete, closed to the network, and harmless whatever names it carries."""

import base64
import hashlib
import re
from dataclasses import replace
from importlib import resources

import pytest
from page_parser import Page

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.spec.experiment_record import NamedModel
from meshscope.spec.plan.memory import Memory
from meshscope.store.run import RunRecord
from meshscope.views.html.blocks import shown
from meshscope.views.html.page import page_html

HOSTILE = (
    '</script><script>alert(1)</script>"\' onload="x" <b>&amp;\x00\x1b[31m\u202e\u2028'
    + "x" * 1_000_000
)
SECTIONS = (
    "asked", "cost", "plans", "collectives", "traffic", "timeline", "intervals", "sizes", "roofline",
    "memory", "sources", "inserted", "conditions",
)  # fmt: skip

STEP = StepTime(
    source=Source.COMPILED,
    phase=Phase.PREFILL,
    step=TimeEstimate(value_s=0.010, low_s=0.008, high_s=0.012),
    compute_s=0.006,
    exposed_s=0.003,
    idle_s=0.001,
    bubble_s=0.0,
    collective_s=0.004,
    exposed_by_axis_s={"tp": 0.003},
    by_basis_s={"compiler_cycles": 0.006, "interconnect_model": 0.003},
    parts=(
        PartCost(part="mlp", compute_s=0.006, collective_s=0.004, exposed_s=0.003, flops=1e12, hbm_bytes=1e9),
    ),
)  # fmt: skip


@pytest.fixture(scope="session")
def timed_run(compiled_run: RunRecord) -> RunRecord:
    return replace(compiled_run, times=(STEP,))


@pytest.fixture(scope="session")
def page(timed_run: RunRecord) -> Page:
    return Page(page_html([timed_run]))


def test_every_section_is_there_even_where_nothing_is_known(
    predicted_run: RunRecord, page: Page
) -> None:
    empty = replace(predicted_run, rows=(), memory={})
    for found in (page, Page(page_html([predicted_run])), Page(page_html([empty]))):
        assert [a["id"] for a in found.attributes("section")] == list(SECTIONS)
    unknown = Page(page_html([empty])).text
    assert "Nothing travels between devices: the run has no collectives." in unknown
    assert unknown.count("Not known:") >= 10


def test_the_headline_says_what_nothing_hides(page: Page) -> None:
    text = page.text
    assert (
        "Of 10 ms a prefill step, 3 ms (30%) is communication over tp that nothing hides; 10% of the step is waiting for memory."
        in text
    )


def test_without_times_the_headline_is_about_bytes(predicted_run: RunRecord) -> None:
    text = Page(page_html([predicted_run])).text
    assert "In a step of prefill each device sends 18.4 kB in 8 collectives." in text
    assert "How long that takes is not known" in text


def test_the_segments_of_a_bar_sum_to_the_step(page: Page) -> None:
    bars = next(c for c in page.data["charts"] if c["kind"] == "bars")["data"]["bars"]
    assert [bar["total"] for bar in bars] == [0.010]
    assert dict(bars[0]["segments"]) == pytest.approx(
        {"compute": 0.006, "exposed over tp": 0.003, "waiting for memory": 0.001}
    )


def test_the_elements_are_balanced_and_their_ids_are_unique(page: Page) -> None:
    assert (page.unbalanced, page.open) == ([], [])
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a in page.attributes("a")]
    assert all(link is not None and link.removeprefix("#") in ids for link in links)


def test_figures_and_data_belong_together(page: Page) -> None:
    numbers = [int(a["data-chart"] or -1) for a in page.attributes("figure")]
    charts = page.data["charts"]
    assert numbers == list(range(len(charts)))
    assert {c["kind"] for c in charts} == {
        "bars",
        "matrix",
        "torus",
        "timeline",
        "sizes",
        "roofline",
    }
    assert all(c["title"] and c["description"] for c in charts)


def test_nothing_is_asked_of_any_host(page: Page) -> None:
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for attribute in ("src", "srcset", "action", "style", "onclick", "onload", "background"):
        assert not [tag for tag, attrs in page.elements if attribute in attrs]
    assert not page.attributes("link")
    assert not page.attributes("iframe")
    assert not re.search(
        r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)",
        "".join(page.raw["style"] + page.raw["script"][1:]),
    )


def test_the_policy_names_the_script_and_style_that_are_there(page: Page) -> None:
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv")) or ""
    for text in (page.raw["script"][1], page.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_rows_have_as_many_cells_as_their_table_has_columns(page: Page) -> None:
    assert len(page.tables) > 5
    for table in page.tables:
        assert len({len(row) for row in table}) == 1


def test_the_verdicts_stand_in_the_table(page: Page) -> None:
    head, *rows = next(t for t in page.tables if "verdict" in t[0])
    verdicts = {row[head.index("verdict")] for row in rows}
    assert verdicts == {"equal", "costlier", "changed", "extra", "missing"}
    assert {"predicted", "compiled"} <= set(head)


def test_hostile_names_add_no_element_and_no_megabyte(timed_run: RunRecord, page: Page) -> None:
    rows = tuple(
        replace(row, algorithm=HOSTILE, axis=HOSTILE, hlo_name=HOSTILE, axis_reason=HOSTILE, source_line=HOSTILE)
        for row in timed_run.rows
    )  # fmt: skip
    model = NamedModel(name=HOSTILE, n_layers=3)
    experiment = replace(timed_run.manifest.experiment, model=model, kernels={HOSTILE: HOSTILE})
    manifest = replace(
        timed_run.manifest, experiment=experiment, versions={HOSTILE: HOSTILE}, command=(HOSTILE,)
    )
    step = replace(STEP, exposed_by_axis_s={HOSTILE: 0.003}, notes=(HOSTILE,))
    text = page_html([replace(timed_run, manifest=manifest, rows=rows, times=(step,))])
    assert len(text) < 500_000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028\u202e]", text)
    found = Page(text)
    assert (found.unbalanced, found.open) == ([], [])
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in page.elements} | {"p"}
    assert len(found.attributes("script")) == 2
    assert "alert(1)" in found.text
    assert not [tag for tag, attrs in found.elements if "onload" in attrs]


def test_runs_stand_side_by_side(timed_run: RunRecord, predicted_run: RunRecord) -> None:
    faster = replace(
        timed_run, times=(replace(STEP, step=TimeEstimate(value_s=0.005, low_s=None, high_s=None)),)
    )
    found = Page(page_html([timed_run, faster, predicted_run]))
    assert (
        "tp=4 (B, compiled) has the fastest prefill step, 5 ms; tp=4 (A, compiled) takes 2.00 times as long, 10 ms."
        in found.text
    )
    head, *rows = next(t for t in found.tables if t[0][:3] == ["run", "model", "plan"])
    assert [row[0] for row in rows] == ["A", "B", "C"]
    assert rows[2][head.index("prefill step")] == "-"
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_a_text_is_cut_and_says_how_long_it_was() -> None:
    assert shown("a\x1b" + "b" * 10, 4) == "a\\x1bbb... [12 characters]"


def test_memory_that_does_not_fit_is_said(timed_run: RunRecord) -> None:
    memory = Memory(
        weights_bytes=2**35, kv_cache_bytes=0, temp_bytes=0, total_bytes=2**35, hbm_bytes=2**34, fits=False
    )  # fmt: skip
    run = replace(timed_run, memory={Source.COMPILED: memory})
    assert "It does not fit: a device would need 200% of the HBM." in Page(page_html([run])).text


def test_the_files_of_the_page_are_in_the_package() -> None:
    names = {path.name for path in resources.files("meshscope.views.html").iterdir()}
    assert {"charts.js", "page.css", "page.html.j2"} <= names
