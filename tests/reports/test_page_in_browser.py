"""The report in headless Chromium: charts, keyboard access, themes, and no network requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import polars as pl
import pytest
from browser import Browser, chromium
from made import estimate, part_cost, step_time

from meshscope.api.records import write_record
from meshscope.events.enums import Phase
from meshscope.events.schema import in_schema
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE
from meshscope.reports.html.page import page_html
from meshscope.store.run import RunRecord

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="needs a Chromium on the PATH"),
]

READY = "document.documentElement?.dataset.ready !== undefined"  # no element yet while it loads
OPENED = (  # every fold, with the charts inside
    "(() => { document.querySelectorAll('details').forEach(d => { d.open = true; });"
    " const n = document.querySelectorAll('figure').length;"
    " return n > 0 && Number(document.documentElement.dataset.ready) === n; })()"
)
FOCUSABLE = "a[href], button, select, summary, svg[tabindex], .scroll[tabindex]"
IS_MARK = "node => node.__data__?.tooltip"
HERE = (
    f"(() => {{ const all = [...document.querySelectorAll('{FOCUSABLE}')];"
    " return all.indexOf(document.activeElement); })()"
)


def figure(title: str) -> str:
    """The figure whose text matches."""
    return f"[...document.querySelectorAll('figure')].find(f => /{title}/.test(f.textContent))"


def choose(browser: Browser, figure: str, select: int, chosen: str) -> None:
    browser.ask(
        f"(() => {{ const pick = {figure}.querySelectorAll('select')[{select}];"
        f" pick.value = '{chosen}'; pick.dispatchEvent(new Event('change')); }})()"
    )


@pytest.fixture(scope="module")
def browser(compiled_run: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("page")
    step = step_time(
        Phase.PREFILL, estimate(0.015, 0.013, 0.017), 0.011,
        exposed_s=0.004, collective_s=0.004, exposed_by_axis_s={"tp": 0.004},
        by_basis_s={"compiler_cycles": 0.006, "interconnect_model": 0.004},
        parts=(
            part_cost("mlp", 0.006, collective_s=0.004, exposed_s=0.004, flops=1e12, hbm_bytes=1e9),
            *(  # close to each other
                part_cost(f"moe.{name}", 0.001, flops=1e11 * (1 + i / 50), hbm_bytes=1e8)
                for i, name in enumerate(("router", "experts", "shared", "dispatch", "combine"))
            ),
        ),
    )  # fmt: skip
    faster = replace(step, step=estimate(0.013), exposed_s=0.002, exposed_by_axis_s={"tp": 0.002})
    rows = (*compiled_run.rows, *(replace(row, axis="dp") for row in compiled_run.rows))
    run = replace(compiled_run, rows=rows, times=(step,))
    span = {"source": "compiled", "phase": "prefill", "lane": "core", "part": "mlp", "dur_s": 8e-4}
    loops = {"layers": [], "repeats": [], "periods_s": []}
    spans = [{**span, **loops, "start_s": 1e-3 * i, "hlo_name": f"fusion.{i}"} for i in range(15)]
    stored = folder / "run"
    stored.mkdir()
    write_record(run, stored)
    in_schema(pl.DataFrame(spans), FOLDED_SCHEMA).write_parquet(stored / TIMELINE)
    run = replace(run, path=stored)
    path = folder / "report.html"
    path.write_text(page_html([run, replace(run, times=(faster,))]), encoding="utf-8")
    with Browser(folder / "profile") as session:
        session.visit(path, f"{READY} && {OPENED}")
        yield session


def test_every_chart_is_drawn_with_marks(browser: Browser) -> None:
    n_figures = browser.ask("document.querySelectorAll('figure').length")
    assert browser.ask("Number(document.documentElement.dataset.ready)") == n_figures > 5
    marks = browser.ask(
        "[...document.querySelectorAll('figure')]"
        f".map(f => [...f.querySelectorAll('svg path, svg line')].filter({IS_MARK}).length)"
    )
    assert min(marks) > 0
    assert not browser.ask("/NaN|undefined/.test(document.querySelector('main').innerHTML)")


def test_tab_reaches_everything_in_order(browser: Browser) -> None:
    n_focusable = browser.ask(f"document.querySelectorAll('{FOCUSABLE}').length")
    browser.ask("document.activeElement.blur()")
    reached: list[int] = []
    for _ in range(n_focusable):
        browser.press("Tab")
        reached.append(browser.ask(HERE))
    assert reached == list(range(n_focusable))


def test_arrow_keys_visit_marks_and_other_keys_zoom(browser: Browser) -> None:
    browser.ask("document.querySelector('figure svg').focus()")
    browser.press("ArrowRight")
    assert browser.ask("document.getElementById('tip').textContent") == (
        "tp=4 (2)\ncompute: 11 ms (85%)"
    )
    browser.press("End")
    assert "interval: 13 ms to 17 ms" in browser.ask("document.getElementById('tip').textContent")
    browser.press("Escape")
    assert browser.ask("document.getElementById('tip').hidden")
    browser.ask(f"{figure('Traffic matrix')}.querySelector('svg').focus()")
    box = "document.activeElement.getAttribute('viewBox').split(' ').map(Number)"
    whole = browser.ask(box)
    browser.press("+")
    assert browser.ask(box)[2] == pytest.approx(whole[2] / 1.6)
    browser.press("0")
    assert browser.ask(box) == whole


def test_zooming_a_timeline_narrows_its_range(browser: Browser) -> None:
    browser.ask(f"{figure('One prefill step')}.querySelector('svg').focus()")
    ticks = "[...document.activeElement.querySelectorAll('.role-axis-label text')].map(t => parseFloat(t.textContent)).sort((a, b) => a - b)"
    every = browser.ask(ticks)
    for _ in range(5):
        browser.press("+")
    zoomed = browser.ask(ticks)
    assert every[0] < zoomed[0] <= zoomed[-1] < every[-1]
    browser.press("ArrowRight", modifiers=8)
    assert browser.ask(ticks)[-1] >= zoomed[-1]
    browser.press("0")
    assert browser.ask(ticks) == every


def test_a_choice_draws_the_chart_again(browser: Browser) -> None:
    matrix = figure("Traffic matrix")
    tips = (
        f"[...{matrix}.querySelectorAll('svg path')].filter({IS_MARK}).map(n => n.__data__.tooltip)"
    )
    of_all = browser.ask(tips)
    choose(browser, matrix, 0, "prefill, tp")
    assert of_all != browser.ask(tips) != []


def test_a_chart_in_a_closed_fold_is_drawn_when_it_is_opened(browser: Browser) -> None:
    fold = "document.querySelector('details.run')"
    browser.ask(f"{fold}.open = false")
    with as_wide_as(browser, 700):
        browser.ask(f"new Promise(r => setTimeout(r, 300)).then(() => {{ {fold}.open = true; }})")
        browser.ask("new Promise(r => setTimeout(r, 300))")
        widths = browser.ask(
            f"[...{fold}.querySelectorAll('svg[tabindex]')].map(s => s.viewBox.baseVal.width)"
        )
    assert widths
    assert max(widths) < 700


def test_a_column_sorts_both_ways(browser: Browser) -> None:
    table = "[...document.querySelectorAll('table')].find(t => /payload/.test(t.tHead.textContent))"
    column = f"[...{table}.tHead.rows[0].cells].findIndex(c => c.textContent === 'payload')"
    values = f"[...{table}.tBodies[0].rows].map(r => Number(r.cells[{column}].dataset.v))"
    for rising in (True, False):
        browser.ask(f"{table}.tHead.rows[0].cells[{column}].querySelector('button').click()")
        column_values = browser.ask(values)
        assert column_values == sorted(column_values, reverse=not rising)
        assert len(set(column_values)) > 1


def test_light_dark_and_auto_follow_each_other(browser: Browser) -> None:
    seen = []
    for _ in range(3):
        browser.ask("document.getElementById('theme').click()")
        seen.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(set(seen)) == 2


@contextmanager
def as_wide_as(browser: Browser, width: int) -> Iterator[None]:
    """The page redrawn in a window of this width."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        yield
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_narrow_window_does_not_scroll_sideways(browser: Browser) -> None:
    with as_wide_as(browser, 390):
        assert browser.ask("document.documentElement.scrollWidth") <= 390


def test_the_page_of_closed_runs_is_short(browser: Browser) -> None:
    runs = "document.querySelectorAll('details.run')"
    browser.ask(f"{runs}.forEach(d => {{ d.open = false; }})")
    with as_wide_as(browser, 1400):
        assert browser.ask("document.documentElement.scrollHeight") < 2500
    browser.ask(f"{runs}.forEach(d => {{ d.open = true; }})")


def test_tables_fit_a_usual_window(browser: Browser) -> None:
    with as_wide_as(browser, 1400):
        wide = browser.ask(
            "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth + 1)"
            ".map(s => [s.getAttribute('aria-labelledby'), s.scrollWidth, s.clientWidth])"
        )
    assert wide == []


def test_printed_pages_are_white_without_buttons(browser: Browser) -> None:
    browser.ask("document.documentElement.setAttribute('data-theme', 'dark')")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert (
            browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        hidden = "[...document.querySelectorAll('button:not(th button), select, nav')].map(b => b.offsetParent)"
        assert set(browser.ask(hidden)) == {None}
        assert browser.ask("document.querySelectorAll('figure svg').length") > 5
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
        browser.ask("document.documentElement.removeAttribute('data-theme')")


def test_the_console_is_empty_and_no_host_is_contacted(browser: Browser) -> None:
    assert browser.complaints == []
    assert len(browser.requested) == 1
    assert browser.requested[0].startswith("file://")


def test_the_table_is_copied_as_tab_separated_values(browser: Browser) -> None:
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    browser.ask("document.querySelector('.table .copy').click()")
    text = browser.ask(
        "new Promise(r => setTimeout(r, 200)).then(() => navigator.clipboard.readText())"
    )
    lines = [line.split("\t") for line in text.split("\n")]
    assert len({len(line) for line in lines}) == 1
    assert lines[1][lines[0].index("TTFT")] == "0.013"
