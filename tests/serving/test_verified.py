"""Compiled choices: their order by compiled figures, and runs that are used again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made import TINY

import meshscope
from meshscope.backends.sweep import queue
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase, Source
from meshscope.serving.objective import Goal, Objective
from meshscope.serving.search import VerifiedChoice, corrected_order, verified_choice

MODEL = "Qwen/Qwen3-4B"
SMALL = TINY | {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def _verified(
    *, tpot_s: float, ttft_s: float | None = None, fits: bool | None = True
) -> VerifiedChoice:
    choice = meshscope.plan(MODEL, topology="v6e-4", batch=8).front[0]
    memory = replace(choice.memory, fits=fits)
    compiled = replace(choice, ttft_s=ttft_s or 2 * choice.ttft_s, tpot_s=tpot_s, memory=memory)
    return VerifiedChoice(choice=choice, folder="", compiled=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("goal", list(Goal))
def test_the_order_is_that_of_compiled_figures(goal: Goal) -> None:
    fast, slow = _verified(tpot_s=0.001), _verified(tpot_s=0.002)
    large = _verified(tpot_s=0.001, fits=False)
    refused = replace(fast, compiled=None, failure="refused")
    order = corrected_order([refused, large, slow, fast], Objective(goal=goal))
    assert order == (fast, slow, large, refused)


@pytest.mark.slow
def test_a_choice_beyond_the_limits_follows_those_within() -> None:
    fast, slow = _verified(tpot_s=0.001, ttft_s=1.0), _verified(tpot_s=0.002)
    assert corrected_order([fast, slow], Objective(ttft_s=0.9)) == (slow, fast)


@pytest.mark.slow
def test_what_the_prediction_missed_is_a_factor() -> None:
    verified = _verified(tpot_s=0.002)
    decode = 0.002 / verified.choice.tpot_s
    assert verified.missed == f"prefill 2.00 x, decode {decode:.2f} x the prediction"


@pytest.mark.slow
@pytest.mark.tpu
def test_verified_runs_are_used_again(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the extra tpu")

    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    out = tmp_path / "runs"

    def verified(prompt: int) -> meshscope.PlanResult:
        return meshscope.plan(tmp_path, topology="v6e-4", batch=8, prompt=prompt, verify=2, out=out)

    first = verified(128)
    assert {v.failure for v in first.verified} == {None}
    made = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.is_dir()}
    assert len(made) == 2
    again = verified(128)
    assert [v.compiled for v in again.verified] == [v.compiled for v in first.verified]
    assert {path: path.stat().st_mtime_ns for path in made} == made
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 6144}))
    with pytest.raises(meshscope.MeshscopeError, match="another model"):
        verified(128)


def test_a_plan_that_cannot_be_compiled_is_a_result(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    program = "import sys; sys.exit('meshscope: refused.')"
    monkeypatch.setattr(queue, "CHILD", ("-c", program))
    lines: list[tuple[str, str]] = []
    options = {"topology": "v6e-4", "batch": 8, "verify": 2, "out": tmp_path / "runs"}
    report = lambda part, step, _: lines.append((part, step))  # noqa: E731
    result = meshscope.plan(tmp_path, progress=report, **options)
    assert [one.failure for one in result.verified] == ["refused."] * 2
    assert {part for part, step in lines if ": failed in " in step} == {"verify sweep"}
    assert sum(": failed in " in step for _, step in lines) == 2


@pytest.mark.slow
def test_a_run_is_compared_with_the_prediction_of_its_choice() -> None:
    """The run has predicted times of its own, which an earlier version may have made."""
    choice = meshscope.plan(MODEL, topology="v6e-4", batch=8).front[0]
    plan = str(choice.experiment.plan)
    run = meshscope.predict(MODEL, topology="v6e-4", plan=plan, batch=8, prompt=1024).record
    times = predicted_times(choice.experiment)
    compiled = (replace(time, source=Source.COMPILED) for time in times)
    stale = (replace(time, step=time.step * 2) for time in times)
    verified = verified_choice(choice, replace(run, times=(*stale, *compiled)), "")
    assert [miss.phase for miss in verified.misses] == [Phase.PREFILL, Phase.DECODE]
    assert [miss.ratio for miss in verified.misses] == pytest.approx([1.0, 1.0])
