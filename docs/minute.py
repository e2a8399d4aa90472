"""The moving picture at the top of the README: the demo, its report, and the page of explore, from real output.

`python docs/pages.py picture` draws it with Chromium after `make demo`. The first frames show the commands and the
answer in the README, which the picture keeps as its comment, so that `pages.py check` compares the two.
"""

import base64
import io
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
MODEL = "Qwen/Qwen3-32B"
SIZE = 1100, 700
SHOWN = 880, 560
READY = "document.documentElement?.dataset.explorer === 'ready'"
DEMO = "make demo"
EXPLORE = f"meshscope explore {MODEL} --topology v6e,tpu7x"
TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #14171f; color: #d9dee8; font: 19px/1.42 monospace; padding: 26px 30px; }
b { color: #7fd1a8; font-weight: 400; } pre { margin: 0; white-space: pre-wrap; font: inherit; }
</style><pre>%s</pre>"""
# What is done in the page: the control, its value, and how long the frame is shown in ms.
STEPS = (
    ("slice", "v6e-8, 8 chips", 1600),
    *(("batch", str(batch), 500) for batch in (2, 4, 8, 16, 32, 64)),
    ("prompt", "8192", 1600),
    ("weight", "int8", 1600),
    ("slice", "tpu7x-16, 8 chips", 1600),
    ("cheapest", "", 1800),
)
CHOOSE = """
((id, text) => {
  const one = document.getElementById(id);
  if (one.tagName === "BUTTON") { one.click(); return; }
  if (id !== "batch") one.value = [...one.options].findIndex((option) => option.textContent === text);
  else one.value = %s.indexOf(Number(text));
  one.dispatchEvent(new Event(id === "batch" ? "input" : "change", { bubbles: true }));
})(%r, %r)
"""
SCROLL = """
scrollTo({ top: document.querySelector("%s").getBoundingClientRect().top + scrollY - 60, behavior: "instant" });
new Promise((done) => setTimeout(done, 300));
"""
BATCHES = [1 << power for power in range(11)]


def draw(answer: str, report: Path, explorer: Path, path: Path) -> None:
    """Writes the picture of the answer and of the two pages."""
    frames: list[Image.Image] = []
    durations: list[int] = []
    sys.path.insert(0, str(ROOT / "tests" / "reports"))
    drive = import_module("browser").Browser  # it drives Chromium in the tests, too
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with scratch as folder, drive(Path(folder) / "profile") as browser:
        size = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        for duration in _played(browser, Path(folder), answer, report, explorer):
            shot = browser.call("Page.captureScreenshot", format="png")["data"]
            image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
            frames.append(image.resize(SHOWN, Image.Resampling.LANCZOS).quantize(96))
            durations.append(duration)
    comment = answer.encode("utf-8")
    first, *rest = frames
    first.save(
        path,
        save_all=True,
        append_images=rest,
        duration=durations,
        loop=0,
        comment=comment,
        optimize=True,
    )


def _played(browser: Any, folder: Path, answer: str, report: Path, explorer: Path) -> Iterator[int]:
    """Shows a frame each time, and for how many ms."""

    def terminal(text: str) -> None:
        page = folder / "terminal.html"
        page.write_text(TERMINAL % text, encoding="utf-8")
        browser.visit(page, "document.readyState === 'complete'")

    prompt = f"<b>$</b> {DEMO}\n"
    for text, duration in (("<b>$</b> ", 500), (prompt, 900), (f"{prompt}{escape(answer)}", 3500)):
        terminal(text)
        yield duration
    browser.visit(report, "document.querySelectorAll('figure[data-chart] svg').length > 0")
    yield 2200
    terminal(f"<b>$</b> {escape(EXPLORE)}\n")
    yield 1200
    browser.visit(explorer, READY)
    yield 1500
    for control, text, duration in STEPS:
        browser.ask(CHOOSE % (BATCHES, control, text))
        yield duration
    browser.ask(SCROLL % "#binds")
    yield 2500
    browser.ask(SCROLL % "figure[data-chart]")
    yield 3000
