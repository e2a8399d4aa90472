"""The report as a document: complete, without network access, and safe for hostile names."""

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
from meshscope.views.charts.cost import COLLECTIVES, COMPUTE, EXPOSED, IDLE, MEMORY, STAGES
from meshscope.views.html.page import page_html

HOSTILE = (
    '</script><script>alert(1)</script>"\' onload="x" <b>&amp;\x00\x1b[31m\u202e\u2028'
    + "x" * 1_000_000
)
SECTIONS = (
    "experiment", "cost", "plans", "collectives", "traffic", "timeline", "intervals", "sizes", "roofline",
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


def test_every_section_is_present_without_data(predicted_run: RunRecord, page: Page) -> None:
    empty = replace(predicted_run, rows=(), memory={})
    for rendered in (page, Page(page_html([predicted_run])), Page(page_html([empty]))):
        assert [a["id"] for a in rendered.attributes("section")] == list(SECTIONS)
    unknown = Page(page_html([empty])).text
    assert "No communication: the run has no collectives." in unknown
    assert unknown.count("Unknown:") >= 10


def test_the_headline_names_exposed_communication(page: Page) -> None:
    text = page.text
    assert (
        "A prefill step takes 10 ms; 3 ms (30%) of it is exposed communication over tp and "
        "10% waits for memory."
    ) in text
    assert "The most expensive part is mlp: 9 ms (90%)." in text


def test_without_times_the_headline_names_bytes(predicted_run: RunRecord) -> None:
    text = Page(page_html([predicted_run])).text
    assert "Each device sends 18.4 kB in 8 collectives per prefill step." in text
    assert "The step time is unknown" in text


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


def test_every_figure_has_its_data(page: Page) -> None:
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


def test_the_page_makes_no_requests(page: Page) -> None:
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


def test_the_policy_hashes_the_script_and_style(page: Page) -> None:
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv")) or ""
    for text in (page.raw["script"][1], page.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_rows_have_as_many_cells_as_their_table_has_columns(page: Page) -> None:
    assert len(page.tables) > 5
    for table in page.tables:
        assert len({len(row) for row in table}) == 1


def test_the_table_shows_the_verdicts(page: Page) -> None:
    head, *rows = next(t for t in page.tables if "verdict" in t[0])
    verdicts = {row[head.index("verdict")] for row in rows}
    assert verdicts == {"equal", "more bytes", "changed", "extra", "missing"}
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
    hostile = Page(text)
    assert (hostile.unbalanced, hostile.open) == ([], [])
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in page.elements} | {"p"}
    assert len(hostile.attributes("script")) == 2
    assert "alert(1)" in hostile.text
    assert not [tag for tag, attrs in hostile.elements if "onload" in attrs]


def test_several_runs_are_compared(timed_run: RunRecord, predicted_run: RunRecord) -> None:
    faster = replace(
        timed_run, times=(replace(STEP, step=TimeEstimate(value_s=0.005, low_s=None, high_s=None)),)
    )
    rendered = Page(page_html([timed_run, faster, predicted_run]))
    assert (
        "tp=4 (B, compiled) has the fastest prefill step (5 ms); "
        "tp=4 (A, compiled) takes 2.00x as long (10 ms)."
    ) in rendered.text
    head, *rows = next(t for t in rendered.tables if t[0][:3] == ["run", "model", "plan"])
    assert [row[0] for row in rows] == ["A", "B", "C"]
    assert rows[2][head.index("prefill step")] == "-"
    ids = [attrs["id"] for _, attrs in rendered.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_the_headline_says_that_memory_does_not_fit(timed_run: RunRecord) -> None:
    memory = Memory(
        weights_bytes=2**35, kv_cache_bytes=0, temp_bytes=0, total_bytes=2**35, hbm_bytes=2**34, fits=False
    )  # fmt: skip
    run = replace(timed_run, memory={Source.COMPILED: memory})
    assert "It does not fit: each device would need 200% of its HBM." in Page(page_html([run])).text


def test_the_script_has_a_color_for_every_segment_of_a_step() -> None:
    script = (resources.files("meshscope.views.html") / "charts.js").read_text()
    for name in (COMPUTE, MEMORY, STAGES, IDLE, COLLECTIVES):
        assert f'["{name}", "' in script
    assert f"/^{EXPOSED}/" in script


def test_the_package_contains_the_files_of_the_page() -> None:
    names = {path.name for path in resources.files("meshscope.views.html").iterdir()}
    assert {"charts.js", "page.css", "page.html.j2"} <= names
