"""Suggestions against predictions of the changed experiment."""

import shlex
from dataclasses import asdict

import pytest

import meshscope
from meshscope.planner.suggestions import suggestions_of


def _predicted(command: str) -> meshscope.Run:
    """The run of a `meshscope predict` command."""
    _, _, model, *words = shlex.split(command)
    options = dict(zip(words[::2], words[1::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    sizes = {name: int(names[name]) for name in ("batch", "prompt", "output") if name in names}
    return meshscope.predict(model, **{**names, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "topology", "plan"),
    [
        ("Qwen/Qwen3-32B", "v6e-8", "tp=8"),
        ("Qwen/Qwen3-30B-A3B", "v6e-8", "dp=2,tp=4"),
        ("meta-llama/Llama-3.1-70B", "v5e-16", "tp=16"),
    ],
)
def test_the_gain_is_that_of_predicting_the_suggested_command(
    model: str, topology: str, plan: str
) -> None:
    run = meshscope.predict(model, topology=topology, plan=plan, batch=32, prompt=1024)
    suggestions = suggestions_of(run.record)
    assert suggestions
    for suggestion in suggestions:
        changed = _predicted(suggestion.command)
        for gain_s, name in (
            (suggestion.ttft_gain_s, "ttft_s"),
            (suggestion.tpot_gain_s, "tpot_s"),
        ):
            assert gain_s == pytest.approx(getattr(run.time, name) - getattr(changed.time, name))
        assert (changed.time.e2e_s or 0.0) < (run.time.e2e_s or 0.0)
        assert suggestion.fits is not False
    assert run.as_dict()["suggestions"] == [asdict(suggestion) for suggestion in suggestions]


def test_a_plan_that_does_not_fit_gets_one_that_may() -> None:
    run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="dp=8", batch=8)
    assert run.memory is not None
    assert run.memory.fits is False
    suggestion = suggestions_of(run.record)[0]
    assert suggestion.fits is not False
    assert "fits" in suggestion.reason


def test_a_chip_without_figures_gets_no_suggestion() -> None:
    run = meshscope.predict("Qwen/Qwen3-8B", topology="cpu:8", plan="tp=8")
    assert suggestions_of(run.record) == ()
