"""The report as a document: complete, without network access, and safe for hostile names."""

import base64
import hashlib
import re
from dataclasses import replace
from importlib import resources

import pytest
from made import estimate, part_cost, step_time, varied
from page_parser import Page

import meshscope
from meshscope.analysis.roofline import why_sentences
from meshscope.events.enums import Phase, Source
from meshscope.plans.experiment_record import NamedModel
from meshscope.plans.memory import Memory, TempBasis
from meshscope.reports.charts.cost import COLLECTIVES, COMPUTE, EXPOSED, IDLE, MEMORY, STAGES
from meshscope.reports.charts.spec import colors_of, look
from meshscope.reports.html import page as page_module
from meshscope.reports.html.page import page_html
from meshscope.store.run import RunRecord

HOSTILE = (
    '</script><script>alert(1)</script>"\' onload="x" <b>&amp;\x00\x1b[31m\u202e\u2028'
    + "x" * 1_000_000
)
SECTIONS = (
    *("cost", "collectives", "sources", "roofline", "traffic", "sizes"),
    *("metrics", "conditions"),
)

STEP = step_time(
    Phase.PREFILL, estimate(0.010, 0.008, 0.012), 0.006,
    exposed_s=0.003, idle_s=0.001, collective_s=0.004, exposed_by_axis_s={"tp": 0.003},
    by_basis_s={"compiler_cycles": 0.006, "interconnect_model": 0.003},
    parts=(part_cost("mlp", 0.006, collective_s=0.004, exposed_s=0.003, flops=1e12, hbm_bytes=1e9),),
)  # fmt: skip


@pytest.fixture(scope="session")
def timed_run(compiled_run: RunRecord) -> RunRecord:
    return replace(compiled_run, times=(STEP,))


def page_of(*runs: RunRecord) -> Page:
    return Page(page_html(runs))


@pytest.fixture(scope="session")
def page(timed_run: RunRecord) -> Page:
    return page_of(timed_run)


def test_sections_without_data_are_left_out(predicted_run: RunRecord, page: Page) -> None:
    assert _sections(page) == [f"{name}-1" for name in SECTIONS]
    empty = page_of(replace(predicted_run, rows=(), memory={}))
    assert _sections(empty) == ["conditions-1"]
    assert "No communication: the run has no collectives." in empty.text
    assert "Unknown: " in empty.text  # why metrics are missing, among the conditions


def _sections(page: Page) -> list[str | None]:
    return [a["id"] for a in page.attributes("details") if a.get("class") == "section"]


def test_the_hero_has_figures_with_intervals_memory_and_reasons(page, timed_run) -> None:
    text = page.text
    assert "TTFT 10 ms 8 to 12 ms; compiled" in text
    assert "Fits: 2.00 of 16.00 GiB of HBM" in text
    assert "weights 1.00 GiB KV cache 0.50 GiB temporaries 0.50 GiB" in text
    why = why_sentences(timed_run)[Phase.PREFILL]
    assert f"prefill {why[0].upper()}{why[1:]}." in text


def test_what_contradicts_the_prediction_is_a_banner(page: Page, timed_run: RunRecord) -> None:
    assert "Collectives: predicted and compiled differ" in page.banners
    parts = {
        "compute_s": 0.001,
        "exposed_s": 0.001,
        "idle_s": 0.0,
        "exposed_by_axis_s": {"tp": 0.001},
    }
    quick = replace(STEP, source=Source.PREDICTED, step=estimate(0.002, 0.001, 0.003), **parts)
    contradicted = page_of(replace(timed_run, times=(quick, STEP)))
    assert "Compiled prefill takes 5.0 x the prediction" in contradicted.banners
    agreeing = page_of(replace(timed_run, times=(replace(STEP, source=Source.PREDICTED), STEP)))
    assert "x the prediction" not in agreeing.banners


def test_sources_that_disagree_are_compared_by_part(timed_run: RunRecord) -> None:
    parts = {"idle_s": 0.002, "exposed_s": 0.002, "exposed_by_axis_s": {"tp": 0.002}}
    predicted = replace(STEP, source=Source.PREDICTED, **parts)
    page = page_of(replace(timed_run, times=(predicted, STEP)))
    head, *rows = next(t for t in page.tables if t[0][0] == "part or axis")
    assert head[1:] == ["predicted", "compiled minus predicted"]
    assert {row[0]: row[1:] for row in rows} == {
        "mlp": ["6 ms", "0 us"],
        "exposed over tp": ["2 ms", "1 ms"],
        "waiting for memory": ["2 ms", "-1 ms"],
        "total": ["10 ms", "0 us"],
    }


def test_memory_beyond_or_close_to_the_limit_comes_first_with_the_reason(
    timed_run: RunRecord,
) -> None:
    memory = Memory(
        weights_bytes=2**33, kv_cache_bytes=0, temp_bytes=2**32, total_bytes=3 * 2**32,
        hbm_bytes=3 * 2**32 + 2**30, fits=None, temp_low_bytes=2**31, temp_high_bytes=2**33,
        temp_basis=TempBasis.ESTIMATE,
    )  # fmt: skip
    text = page_of(replace(timed_run, memory={Source.COMPILED: memory})).text
    assert "Close to the limit: 12.00 (10.00 to 16.00) of 13.00 GiB of HBM" in text
    assert "contains the limit" in text
    page = page_of(replace(timed_run, memory={Source.COMPILED: TOO_LARGE}))
    assert page.banners.startswith("Does not fit: a device needs 32.00 of 16.00 GiB of HBM.")


def test_suggestions_have_a_gain_and_a_command() -> None:
    run = meshscope.predict(
        "Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8", batch=8, prompt=1024, output=128
    )
    page = page_of(run.record)
    assert re.search(r"Try next .* (TTFT|TPOT) -[\d.]+ ms.* \(predicted\)", page.text)
    assert len(page.attributes("code")) >= 1


def test_without_times_the_hero_names_bytes(predicted_run: RunRecord) -> None:
    text = page_of(predicted_run).text
    assert "Prefill: 8 collectives, 18.4 kB on the wire per step." in text
    assert "The step time is unknown" in text


def test_the_segments_of_a_bar_sum_to_the_step(page: Page) -> None:
    bars = next(c for c in page.data["charts"] if c["kind"] == "bars")["spec"]["layer"][0]
    segments = bars["data"]["values"]
    assert {one["label"]: one["b"] - one["a"] for one in segments} == pytest.approx(
        {"compute": 0.006, "exposed over tp": 0.003, "waiting for memory": 0.001}
    )
    assert segments[-1]["b"] == pytest.approx(0.010)


def test_the_elements_are_balanced_with_unique_ids_and_tables_whole(page: Page) -> None:
    assert (page.unbalanced, page.open) == ([], [])
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a in page.attributes("a")]
    assert all(link is not None and link.removeprefix("#") in ids for link in links)
    assert len(page.tables) > 5
    for table in page.tables:
        assert len({len(row) for row in table}) == 1


def test_every_figure_has_its_data(page: Page) -> None:
    numbers = [int(a["data-chart"] or -1) for a in page.attributes("figure")]
    charts = page.data["charts"]
    assert numbers == list(range(len(charts)))
    kinds = {"bars", "matrix", "torus", "sizes"}
    assert {c["kind"] for c in charts} == kinds
    assert all(c["title"] and c["description"] for c in charts)


def test_the_page_makes_no_requests_and_its_policy_hashes_script_and_style(page: Page) -> None:
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for attribute in ("src", "srcset", "action", "style", "onclick", "onload", "background"):
        assert not [tag for tag, attrs in page.elements if attribute in attrs]
    assert not page.attributes("link")
    assert not page.attributes("iframe")
    assert not re.search(
        r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)",
        "".join(page.raw["style"] + page.raw["script"][2:]),
    )
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv")) or ""
    for text in (page.raw["script"][1], page.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_table_shows_the_verdicts(page: Page) -> None:
    head, *rows = next(t for t in page.tables if "verdict" in t[0])
    verdicts = {row[head.index("verdict")] for row in rows}
    assert verdicts == {"equal", "more bytes", "changed", "extra", "missing"}
    assert {"predicted", "compiled"} <= set(head)


@pytest.mark.slow
def test_hostile_names_add_no_element_and_no_megabyte(timed_run: RunRecord, page: Page) -> None:
    rows = tuple(
        replace(row, algorithm=HOSTILE, axis=HOSTILE, hlo_name=HOSTILE, axis_reason=HOSTILE, source_line=HOSTILE)
        for row in timed_run.rows
    )  # fmt: skip
    model = NamedModel(name=HOSTILE, n_layers=3)
    facts = {"model": model, "kernels": {HOSTILE: HOSTILE}}
    manifest = {"versions": {HOSTILE: HOSTILE}, "command": (HOSTILE,)}
    step = replace(STEP, exposed_by_axis_s={HOSTILE: 0.003}, notes=(HOSTILE,))
    named = varied(timed_run, experiment=facts, manifest=manifest, rows=rows, times=(step,))
    several = page_html([named, replace(named, times=(FAST,)), timed_run])
    assert len(several) < 2_000_000  # 0.8 MB of them Vega
    assert (Page(several).unbalanced, Page(several).open) == ([], [])
    assert len(Page(several).attributes("script")) == 3
    text = page_html([named])
    assert len(text) < 1_100_000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028\u202e]", text)
    hostile = Page(text)
    assert (hostile.unbalanced, hostile.open) == ([], [])
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in page.elements} | {"p"}
    assert len(hostile.attributes("script")) == 3
    assert "alert(1)" in hostile.text
    assert not [tag for tag, attrs in hostile.elements if "onload" in attrs]


FAST = replace(STEP, step=estimate(0.005, 0.004, 0.006), compute_s=0.001)
TOO_LARGE = Memory(
    weights_bytes=2**35, kv_cache_bytes=0, temp_bytes=0, total_bytes=2**35, hbm_bytes=2**34, fits=False
)  # fmt: skip


def _with_batch(run: RunRecord, batch: int) -> RunRecord:
    workload = replace(run.manifest.experiment.workload, batch=batch)
    return varied(run, experiment={"workload": workload})


def test_runs_of_the_same_work_are_ranked_and_compared_with_the_best(timed_run: RunRecord) -> None:
    rendered = page_of(timed_run, replace(timed_run, times=(FAST,)))
    assert "tp=4 (2) serves the request fastest: 5 ms" in rendered.text
    head, *rows = _runs_table(rendered)
    assert [row[0] for row in rows] == ["tp=4 (2)", "tp=4 (1)"]
    assert [row[head.index("TTFT")] for row in rows] == ["5 ms", "10 ms"]
    head, *rows = next(t for t in rendered.tables if t[0][0] == "part or axis")
    assert head[1:] == ["tp=4 (2)", "tp=4 (1) minus tp=4 (2)"]
    assert {row[0]: row[1] for row in rows} == {
        "mlp": "6 ms",
        "exposed over tp": "3 ms",
        "waiting for memory": "1 ms",
        "total": "10 ms",
    }
    ids = [attrs["id"] for _, attrs in rendered.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_many_runs_are_all_ranked_and_the_best_have_a_page(timed_run, monkeypatch) -> None:
    monkeypatch.setattr(page_module, "MAX_PAGES", 3)
    steps = [replace(STEP, step=replace(STEP.step, value_s=0.01 + i / 1000)) for i in range(5)]
    rendered = page_of(*(replace(timed_run, times=(step,)) for step in reversed(steps)))
    assert len(_runs_table(rendered)) == 6
    pages = [a["id"] for a in rendered.attributes("details") if a.get("class") == "run"]
    assert pages == [f"run-{number}" for number in range(5, 2, -1)]
    assert "2 more runs have no page here" in rendered.text


def test_a_run_that_does_not_fit_is_struck_out_and_never_the_best(timed_run: RunRecord) -> None:
    large = replace(timed_run, times=(FAST,), memory={Source.COMPILED: TOO_LARGE})
    rendered = page_of(large, timed_run)
    assert "tp=4 (2) takes 10 ms for the request" in rendered.text
    _, *rows = _runs_table(rendered)
    assert [row[0] for row in rows] == ["tp=4 (2)", "tp=4 (1)"]
    classes = [a.get("class") for a in rendered.attributes("tr") if a.get("class")]
    assert classes == ["best", "out"]


def test_different_work_is_not_ranked_and_named_by_the_batch(timed_run: RunRecord) -> None:
    other = _with_batch(replace(timed_run, times=(FAST,)), 64)
    rendered = page_of(timed_run, other)
    assert "No two runs do the same work" in rendered.text
    assert [row[0] for row in _runs_table(rendered)[1:]] == ["tp=4 batch 2", "tp=4 batch 64"]
    assert "part or axis" not in {t[0][0] for t in rendered.tables}


def test_each_request_has_its_own_best_run(timed_run: RunRecord) -> None:
    fast = replace(timed_run, times=(FAST,))
    runs = [timed_run, fast, _with_batch(timed_run, 64), _with_batch(fast, 64)]
    rendered = page_of(*runs)
    assert "The fastest runs of 2 requests" in rendered.text
    for batch in (2, 64):
        assert re.search(rf"batch {batch}, prompt 8, output 10 tp=4 \(2\) serves the request fastest: 5 ms\.", rendered.text)  # fmt: skip
    tables = [t for t in rendered.tables if t[0][0] == "run"]
    assert [[row[0] for row in t[1:]] for t in tables] == [["tp=4 (2)", "tp=4 (1)"]] * 2


def _runs_table(page: Page) -> list[list[str]]:
    return next(t for t in page.tables if t[0][0] == "run")


def test_a_name_has_one_color_which_the_style_of_the_page_defines() -> None:
    style = (resources.files("meshscope.reports.html") / "page.css").read_text()
    assert all(f"--{name}: {color};" in style for name, color in look()["palette"].items())
    assert {COMPUTE, MEMORY, STAGES, IDLE, COLLECTIVES} <= look()["fixed"].keys()
    colors = colors_of([COMPUTE, f"{EXPOSED}tp", f"{EXPOSED}x", "x", "tp"])
    assert colors[f"{EXPOSED}tp"] == colors["tp"] != colors["x"] == colors[f"{EXPOSED}x"]


def test_the_script_of_vega_states_its_license_and_names_no_host_that_it_could_ask() -> None:
    script = (resources.files("meshscope.reports.html") / "vega.js").read_text()
    assert "University of Washington Interactive Data Lab" in script
    assert "Redistribution and use" in script
    hosts = set(re.findall(r"https?://([a-z0-9.]+)", script))  # names of formats, and a comment
    assert hosts == {"www.w3.org", "github.com", "vega.github.io"}
    assert len(script) < 1_000_000
