"""The first lines of a run: at most twelve at 80 columns, whatever the sources."""

from contextlib import suppress
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import meshscope
from meshscope.errors import PlanError
from meshscope.events.enums import Source
from meshscope.model.catalog import catalog
from meshscope.reports.answer import Answer, answer_of
from meshscope.reports.answer_text import MAX_LINES, answer_lines


@pytest.fixture(scope="module")
def predicted() -> Answer:
    run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8", batch=64, prompt=1024)
    return answer_of(run.record)


def _text(answer: Answer) -> str:
    console = Console(width=80, file=StringIO())
    console.print(*answer_lines(answer), sep="\n")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_one_source_is_shown_with_its_room_and_all_suggestions(predicted: Answer) -> None:
    text = _text(predicted)
    assert "room for batch" in text
    assert text.count("- try ") == len(predicted.suggestions) > 0


def test_two_sources_with_long_sentences_stay_within_the_limit(predicted: Answer) -> None:
    (source,) = predicted.sources
    compiled = replace(source, source=Source.COMPILED)
    tail = ", 401 us exposed tp communication, 201 us latency of small ops"
    long = {phase: sentence + tail for phase, sentence in predicted.why.items()}
    text = _text(replace(predicted, sources=(source, compiled), why=long))
    assert len(text.rstrip("\n").splitlines()) <= MAX_LINES
    for line in (
        *("TTFT, prefill", "decode rate", " per chip\n", "fits", "- prefill "),
        *("- decode ", "- try "),
    ):
        assert line in text
    assert "401 us" not in text


PLANS = ("tp=8", "fsdp=-1", "pp=2,tp=4", "dp=2,tp=4", "tp=8,sp")


MODELS = [
    pytest.param(at, name, marks=[pytest.mark.matrix] * (at % 4 != 0))
    for at, name in enumerate(sorted(catalog()))
]


@pytest.mark.parametrize(("at", "name"), MODELS)
def test_the_answer_of_every_model_has_twelve_lines_of_eighty_columns(at: int, name: str) -> None:
    options = {"topology": "v6e-8", "batch": 64, "prompt": 1024, "weight_dtype": "int8"}
    for plan in (PLANS[at % len(PLANS)], "dp=8"):
        with suppress(PlanError):  # a model without this plan
            run = meshscope.predict(name, plan=plan, **options)
            break
    lines = run.text().partition("\n\n")[0].splitlines()
    assert len(lines) <= MAX_LINES == 12
    assert max(map(len, lines)) <= 80
