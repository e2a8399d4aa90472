"""The page of `explore` in headless Chromium: its figures are those of `predict`, and its controls work by keyboard."""

import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium

import meshscope
from meshscope.analysis.roofline import why_sentence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="needs a Chromium on the PATH"),
]

READY = "document.documentElement?.dataset.explorer === 'ready'"
MAX_BYTES = 3_000_000
N_SETTINGS = 500
PRICE = 2.7
CASES = {
    # dense, and a mixture of experts; batches that data axes and micro-batches divide, long prompts that are cut
    "Qwen/Qwen3-32B": ("v6e-8,tpu7x-8", "128,512,1000,8192,32768", 300),
    "Qwen/Qwen3-30B-A3B": ("v6e-4,v5e-8", "128,1024,16384", 150),
    "google/gemma-3-27b-it": ("v6e-8", "1024,32768", 50),
}
CHOOSE = """
(() => {
  const pick = (id, value) => {
    const one = document.getElementById(id);
    one.value = value;
    one.dispatchEvent(new Event(id === "batch" ? "input" : "change", { bubbles: true }));
  };
  const read = (id) => ({ ...document.getElementById(id).dataset });
  return %s.map((chosen) => {
    pick("slice", chosen.shift() %% document.getElementById("slice").options.length);
    pick("plan", chosen.shift() %% document.getElementById("plan").options.length);
    for (const id of ["prompt", "output", "weight", "cache"]) pick(id, chosen.shift() %% document.getElementById(id).options.length);
    pick("batch", chosen.shift() %% (Number(document.getElementById("batch").max) + 1));
    return {
      command: document.getElementById("command-text").textContent,
      memory: read("memory"),
      why: ["prefill-step", "decode-step"].map((id) => document.querySelector(`#${id} p`).textContent),
      ...Object.fromEntries(["ttft", "tpot", "e2e", "rate", "cost"].map((id) => [id, read(id)])),
    };
  });
})()
"""


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
    assert float(shown["memory"]["total"]) == pytest.approx(memory.total_bytes, rel=1e-6)
    assert shown["memory"]["fits"] == memory.fit.value


@pytest.mark.parametrize("model", CASES)
def test_the_figures_are_those_of_predict(model: str, tmp_path: Path) -> None:
    topology, prompts, n = CASES[model]
    path = made_page(tmp_path, model, topology, prompts)
    assert path.stat().st_size <= MAX_BYTES
    source = random.Random(0)
    settings = [[source.randrange(1 << 16) for _ in range(7)] for _ in range(3 * n)]
    with Browser(tmp_path / "profile") as browser:
        browser.visit(path, READY)
        shown = browser.ask(CHOOSE % settings)
        assert browser.complaints == []
        assert len(browser.requested) == 1
    # Without a figure: a batch that the plan does not divide, or a cut prompt that does not fit.
    every = [one for one in shown if one["ttft"]["value"]]
    assert len(every) >= n
    for one in every[:n]:
        check(one)
