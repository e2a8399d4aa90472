"""The first lines of a run: at most twelve at 80 columns, whatever the sources."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import meshscope
from meshscope.events.enums import Source
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
    for line in ("TTFT, prefill", "throughput", "fits", "- prefill ", "- decode "):
        assert line in text
    assert "401 us" not in text
