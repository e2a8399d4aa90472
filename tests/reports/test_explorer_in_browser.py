"""The page of `explore` in headless Chromium: its figures are those of `predict`, and its controls work by keyboard."""

import random
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from tables import stored

import meshscope
from meshscope.analysis.roofline import why_sentence
from meshscope.reports.answer import Fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="needs a Chromium on the PATH"),
]

READY = "document.documentElement?.dataset.explorer === 'ready'"
MAX_BYTES = 3_000_000
PRICE = 2.7
CASES = {
    # 580 settings: dense, and a mixture of experts; batches that data axes and micro-batches divide, long prompts that are cut
    "Qwen/Qwen3-32B": ("v6e-8,tpu7x-8", "128,512,1000,8192,32768", 300),
    "Qwen/Qwen3-30B-A3B": ("v6e-4,v5e-8", "128,1024,16384", 150),
    "google/gemma-3-27b-it": ("v6e-8", "1024,32768", 50),
    # chosen positions, also over cp; last tokens that alone pass through layers, and memory without an estimate
    "deepseek-ai/DeepSeek-V3.2": ("tpu7x-16", "1024,8192", 40),
    "deepseek-ai/DeepSeek-V4.1-Flash": ("tpu7x-16", "1024,8192", 40),
}
TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
CHOOSE = TEXTS["CHOOSE"]


def predicted(command: str) -> meshscope.Run:
    """The run of the command that the page shows."""
    program, name, model, *options = shlex.split(command)
    assert (program, name) == ("meshscope", "predict")
    values: dict[str, Any] = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in zip(options[::2], options[1::2], strict=True)
    }
    return meshscope.predict(model, **values)


def made_page(folder: Path, model: str, topology: str, prompts: str) -> Path:
    return meshscope.explore(
        model,
        topology=topology,
        prompt=prompts,
        batch="1:1024" if topology != "tpu7x-16" else "16:64",
        prices="v6e=2.7,v5e=2.7,tpu7x=2.7",
        out=folder / "page.html",
    )


def check(shown: dict[str, Any]) -> None:
    """Compares the figures of the page with those of the command that it shows."""
    run = predicted(shown["command"])
    steps = {time.phase.value: time.step for time in run.record.times}
    for tile, phase in (("ttft", "prefill"), ("tpot", "decode")):
        for end, value in (("value", "value_s"), ("low", "low_s"), ("high", "high_s")):
            assert float(shown[tile][end]) == pytest.approx(getattr(steps[phase], value), rel=1e-6)
    workload, topology = run.experiment.workload, run.experiment.topology
    e2e_s = run.time.e2e_s
    assert float(shown["e2e"]["value"]) == pytest.approx(e2e_s, rel=1e-6)
    assert float(shown["rate"]["value"]) == pytest.approx(
        workload.batch / run.time.tpot_s, rel=1e-6
    )
    cost = PRICE * topology.n_chips * e2e_s / 3600 / (workload.batch * workload.output) * 1e6
    assert float(shown["cost"]["value"]) == pytest.approx(cost, rel=1e-6)
    chip, dtype = topology.chip, workload.weight_dtype
    assert shown["why"] == [why_sentence(time, chip, dtype) for time in run.record.times]
    memory = run.memory
    assert float(shown["memory"]["total"]) == pytest.approx(
        Fit(memory=memory).known_bytes, rel=1e-6
    )
    assert shown["memory"]["fits"] == memory.fit.value


@pytest.mark.parametrize("model", CASES)
def test_the_figures_are_those_of_predict(model: str, tmp_path: Path) -> None:
    topology, prompts, n = CASES[model]
    path = made_page(tmp_path, model, topology, prompts)
    assert path.stat().st_size <= MAX_BYTES
    # Ten random choices of slice, plan and batch for each of lengths and precisions, which the page keeps.
    source = random.Random(0)
    index = partial(source.randrange, 1 << 16)
    each = [[index() for _ in range(4)] for _ in range(n)]
    settings = [[index(), index(), *one, index()] for one in each for _ in range(10)]
    with Browser(tmp_path / "profile") as browser:
        browser.visit(path, READY)
        every = browser.ask(CHOOSE % (n, settings))
        assert browser.complaints == []
        assert len(browser.requested) == 1
    assert len(every) == n
    for one in every:
        check(one)


SERVER = "vllm-tpu"
SMALL = {"prompt": "512", "output": "64", "weight_dtype": "bf16", "cache_dtype": "bf16"}
CONTRAST = TEXTS["CONTRAST"]
CUT_OFF = TEXTS["CUT_OFF"]
FOCUSED = "document.activeElement.id || document.activeElement.textContent.slice(0, 20)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A page with a server."""
    folder = tmp_path_factory.mktemp("explorer")
    path = meshscope.explore(
        "Qwen/Qwen3-4B",
        topology="v6e-4,v5e-4",
        batch="1:16",
        server=SERVER,
        out=folder / "page.html",
        **SMALL,
    )
    with Browser(folder / "profile") as one:
        one.visit(path, READY)
        yield one


def test_figures_of_a_server_are_those_of_predict(browser: Browser) -> None:
    browser.ask("document.getElementById('server').value = '1'")
    browser.ask("document.getElementById('server').dispatchEvent(new Event('change'))")
    settings = [
        [at, plan, 0, 0, 0, 0, batch] for at in (0, 1) for plan in range(4) for batch in (0, 3)
    ]
    shown = browser.ask(CHOOSE % (len(settings), settings))
    assert len({one["command"] for one in shown}) >= 6
    for one in shown:
        served = predicted(one["command"]).record.manifest.served
        assert served is not None
        assert one["command"].endswith(f" --server {served.server}")
        times = {name: float(one[name]["value"]) for name in ("ttft", "tpot", "rate")}
        expected = {
            "ttft": served.ttft_s,
            "tpot": served.tpot_s,
            "rate": served.output_tokens_per_s,
        }
        assert times == pytest.approx(expected, rel=1e-6)
        assert one["ttft"]["low"] == ""  # simulated, without an interval
    browser.ask("document.getElementById('server').value = '0'")
    browser.ask("document.getElementById('server').dispatchEvent(new Event('change'))")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_text_is_legible_and_nothing_is_cut_off(browser: Browser, width: int, theme: str) -> None:
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(CUT_OFF) == []
    contrast, text = browser.ask(CONTRAST)
    assert contrast >= 4.5, text  # WCAG 2.2, 1.4.3 (AA)
    heights = browser.ask(
        "[...document.querySelectorAll('#controls select, #controls input, #controls button')].map((one) => one.offsetHeight)"
    )
    assert min(heights) >= 24  # WCAG 2.2, 2.5.8 (AA)


def test_the_page_works_by_keyboard(browser: Browser) -> None:
    browser.ask("document.activeElement.blur(); document.getElementById('slice').focus()")
    reached = []
    for _ in range(14):
        reached.append(browser.ask(FOCUSED))
        assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") != "none", (
            reached[-1]
        )
        browser.press("Tab")
    expected = ["slice", "plan", "batch", "prompt", "output", "weight", "cache", "server"]
    assert [one for one in reached if one in expected] == expected
    assert {"best-plan", "cheapest", "fastest"} <= set(reached)
    answer = "document.getElementById('answer').textContent"
    browser.ask("document.getElementById('batch').focus()")
    browser.press("Home")
    before = browser.ask(answer)
    assert "batch 1:" in before
    browser.press("ArrowRight")
    assert "batch 2:" in browser.ask(answer)
    browser.ask("document.getElementById('cheapest').focus()")
    browser.press(" ")
    assert "batch 16:" in browser.ask(answer)


def test_a_screen_reader_has_a_name_for_every_control(browser: Browser) -> None:
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"combobox", "slider", "button", "spinbutton", "textbox", "image", "heading"}
    named = [
        (one["role"]["value"], one.get("name", {}).get("value", ""))
        for one in nodes
        if not one["ignored"] and one["role"]["value"] in roles
    ]
    assert [one for one in named if not one[1].strip()] == []
    assert {role for role, _ in named} >= {"combobox", "slider", "button", "spinbutton", "heading"}
    assert browser.ask("document.getElementById('answer').getAttribute('aria-live')") == "polite"
