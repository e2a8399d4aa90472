"""Terminal output: complete at any width, with and without color."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from made import estimate, of_source, part_cost, step_time, varied
from rich.cells import cell_len
from rich.console import Console, RenderableType

from meshscope.analysis.catalog import METRICS
from meshscope.analysis.comparison import Side
from meshscope.analysis.join import compare
from meshscope.api.predict import predict
from meshscope.events.enums import Part, Phase, Source
from meshscope.events.measured import Measured, Request
from meshscope.events.step_time import StepTime, UnestimatedWork
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import NamedModel
from meshscope.plans.workload import Workload
from meshscope.reports.conditions import differing_work
from meshscope.reports.document import run_document
from meshscope.reports.metrics import metrics_document, metrics_text
from meshscope.reports.summary import memory_table
from meshscope.reports.tables import shown_lines
from meshscope.reports.text import comparison_text, full_text, rows_text
from meshscope.reports.times import caveat_lines, time_lines
from meshscope.store.run import RunRecord

RunView = Callable[[RunRecord, Console], Iterable[RenderableType]]

DATA = Path(__file__).parent / "data"
WIDTHS = (40, 80, 100, 200)


def run_output(run: RunRecord, width: int, *, view: RunView = rows_text) -> str:
    out = Console(file=StringIO(), width=width, highlight=False, markup=False, emoji=False)
    with out.capture() as capture:
        for part in view(run, out):
            out.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def compared(run: RunRecord, width: int, source: Source = Source.COMPILED) -> str:
    left = Side(name="predicted", run=run, source=Source.PREDICTED)
    right = Side(name=source.value, run=run, source=source)
    comparison = compare(run.rows_of(left.source), run.rows_of(right.source))
    return run_output(run, width, view=lambda _, out: comparison_text(comparison, left, right, out))


PREDICTED = (DATA / "predicted.txt").read_text("utf-8")


def test_a_prediction_as_text(predicted_run: RunRecord) -> None:
    assert run_output(predicted_run, 80).startswith(PREDICTED)


def test_assumptions_and_conditions_are_under_full(compiled_run: RunRecord) -> None:
    run = replace(compiled_run, times=(decode_step(Source.PREDICTED, 0.1),))
    short, full = run_output(run, 80), run_output(run, 80, view=full_text)
    for words in ("assumes device time", "versions  ", "program  ", "basis "):
        assert words in full
        assert words not in short


COMPILED_PREFILL_AT_100 = (DATA / "compiled_prefill_at_100.txt").read_text("utf-8")


def test_predicted_and_compiled_counts_are_side_by_side(compiled_run: RunRecord) -> None:
    text = run_output(compiled_run, 100)
    assert COMPILED_PREFILL_AT_100 in text


def test_times_that_differ_are_in_the_first_lines_of_show_and_compare(compiled_run) -> None:
    """Equal collectives do not make times equal that differ beyond their intervals."""
    exact = (replace(row, source=Source.COMPILED) for row in compiled_run.rows_of(Source.PREDICTED))
    rows = (*compiled_run.rows_of(Source.PREDICTED), *exact)
    times = (decode_step(Source.PREDICTED, 0.1), decode_step(Source.COMPILED, 0.5))
    run = replace(compiled_run, rows=rows, times=times)
    for text in (run_output(run, 80), compared(run, 80)):
        first = text.splitlines()[:12]
        assert "collectives: predicted = compiled" in first
        assert "times: compiled decode takes 5.0 x the prediction" in first
        assert "agree" not in text


def decode_step(source: Source, seconds: float) -> StepTime:
    return step_time(
        Phase.DECODE, estimate(seconds, 0.9 * seconds, 1.1 * seconds), seconds, source=source
    )


def shown_words(run: RunRecord) -> list[str]:
    words: list[str] = []
    for row in run.rows_of(run.manifest.source):
        words += [
            row.kind,
            row.algorithm or "",
            f"{row.dtype}[{','.join(map(str, row.shape or ()))}]",
        ]
    return words


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_console_and_nothing_is_cut(compiled_run, width) -> None:
    """Folded text, put together again column by column, has every word; here: no ellipsis at all."""
    full = run_output(compiled_run, width, view=full_text)
    for text in (run_output(compiled_run, width), full, compared(compiled_run, width)):
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "…" not in text
    if width >= 80:
        text = run_output(compiled_run, width, view=full_text)
        assert [word for word in shown_words(compiled_run) if word not in text] == []


def test_only_differences_are_compared_in_rows(compiled_run: RunRecord) -> None:
    text = compared(compiled_run, 80)
    rows = re.findall(
        r" k?B  (equal|more bytes|fewer bytes|changed|missing|extra)$", text, re.MULTILINE
    )
    assert rows == ["extra", "changed", "more bytes", "missing"]
    assert "4 collectives equal per step" in text
    assert "inserted by the partitioner at meshscope/programs/decoder.py:7" in text


def test_rows_that_look_equal_are_merged(predicted_run: RunRecord) -> None:
    """All-gathers of two weights of the same shape come from different source lines."""
    row = predicted_run.rows[0]
    rows = (replace(row, source_line="a.py:1"), replace(row, source_line="a.py:2", count=3))
    lines = [
        line.split() for line in run_output(replace(predicted_run, rows=rows), 100).splitlines()
    ]
    first = [line for line in lines if line[:1] == ["all_reduce"]]
    assert [line[-3] for line in first] == ["4"]


def test_hostile_strings_are_escaped(predicted_run: RunRecord) -> None:
    """Markup and control characters from a file have no effect."""
    evil = "[bold]x[/bold]\x1b[2J\x07:smile:"
    rows = tuple(
        replace(row, axis=None, axis_reason=evil, algorithm=evil, source_line=evil)
        for row in predicted_run.rows
    )
    facts, manifest = {"model": NamedModel(name=evil)}, {"versions": {evil: evil}}
    run = varied(predicted_run, experiment=facts, manifest=manifest, rows=rows)
    text = run_output(run, 200, view=full_text)
    assert not {"\x1b", "\x07"} & set(text)
    assert text.count("[bold]x[/bold]\\x1b[2J\\x07:smile:") >= 4


def test_unattributed_collectives_are_counted_with_their_reason(predicted_run: RunRecord) -> None:
    lost = replace(predicted_run.rows[0], phase=None, part=None, axis_reason="no scope", count=2)
    text = run_output(replace(predicted_run, rows=(lost,)), 100)
    assert "unknown phase: 2 collectives, " in text
    assert "unattributed: 2 collectives, 4.1 kB payload\n  2 x no scope" in text


def test_a_plan_without_collectives_says_so_and_a_prediction_how_it_is_timed(
    predicted_run: RunRecord,
) -> None:
    text = run_output(replace(predicted_run, rows=()), 80)
    assert "prefill\nno collectives\n" in text
    full = run_output(predicted_run, 200, view=full_text)
    assert "timed with layers unrolled, as servers run them" in full
    assert "scanned" not in full


def test_collectives_equal_in_all_sources_are_not_listed(compiled_run: RunRecord) -> None:
    """Also for measured runs, whose tables show compiled counts between predicted and measured ones."""
    run = of_source(compiled_run, Source.MEASURED, compiled_run.rows_of(Source.COMPILED))
    table = compared(run, 200, Source.MEASURED).split("decode: ")[1]
    assert re.search(r"mlp +0-2 .* 3 +3 +3 .* more bytes", table)
    assert "lm_head" not in table


def test_weaker_sources_without_times_have_no_column(compiled_run: RunRecord) -> None:
    """A run on virtual CPU devices has measured times alone; no reason is given for modeled ones."""
    measured = Measured(
        requests=(Request(prefill_s=0.5, decode_s=(0.25, 0.25)),),
        n_profiled_steps={Phase.PREFILL: 1}, loads=(), times=(), findings=(),
    )  # fmt: skip
    run = of_source(compiled_run, Source.MEASURED, compiled_run.rows_of(Source.COMPILED))
    run = varied(run, experiment={"topology": parse_topology("cpu:4")}, measured=measured)
    answer = run_output(run, 80).partition("\n\n")[0]
    assert "cache int8 (measured)" in " ".join(answer.split())
    assert (
        "\nTTFT, prefill  500 ms\nTPOT, decode   250 ms\n"
        "throughput     8 decode tokens/s, 2 per chip\ncollectives: " in answer
    )
    assert "unknown" not in answer


def test_an_unknown_shape_is_taken_from_the_matching_row(compiled_run: RunRecord) -> None:
    """A windowed einsum sends slices; the HLO does not contain the shape of the full array."""
    rows = (
        replace(row, shape=None) if row.source is Source.COMPILED and row.part is Part.MLP else row
        for row in compiled_run.rows
    )
    text = compared(replace(compiled_run, rows=tuple(rows)), 200)
    assert re.search(r"bf16\[2,8,64\] +mlp +0-2 ", text)
    assert "?" not in text


PARTS = ("weights", "KV cache", "temporaries", "padding, other")


@pytest.mark.parametrize(
    ("model", "has_padding"), [("DeepSeek-V2-Lite", True), ("Llama-3.1-8B", False)]
)
def test_the_parts_of_the_memory_add_up_to_the_total(model: str, *, has_padding: bool) -> None:
    """DeepSeek-V2-Lite with tp=8 pads its experts, 176 columns in rows of 256."""
    run = predict(model, topology="v6e-8", plan="tp=8", batch=32, prompt=1024)
    table = memory_table({Source.PREDICTED: run.record.memory[Source.PREDICTED]})
    rows = {str(row[0]): row[1] for row in table.rows}
    assert ("padding, other" in rows) == has_padding
    parts = [rows[name] for name in PARTS if name in rows]
    assert len(parts) == 3 + has_padding
    assert rows["total"] == sum(part for part in parts if isinstance(part, int | float))


@pytest.mark.parametrize("width", [80, 200])
def test_every_metric_is_shown_or_explained(compiled_run: RunRecord, width: int) -> None:
    text = run_output(compiled_run, width, view=metrics_text)
    assert max(map(len, text.splitlines())) <= width
    for metric in METRICS:
        assert metric.title in " ".join(text.split())
    assert "only runs on live devices have a profile" in text
    assert "nan" not in text.lower().split()


def test_the_document_has_rows_or_a_reason(compiled_run: RunRecord) -> None:
    document = json.loads(json.dumps(metrics_document(compiled_run), allow_nan=False))
    assert list(document) == [metric.name for metric in METRICS]
    for metric in document.values():
        assert ("rows" in metric) != ("reason" in metric)
        assert metric["unit"]
    assert {row["source"] for row in document["volume"]["rows"]} == {"predicted", "compiled"}
    assert "neither timed" in document["bandwidth"]["reason"]


def test_every_metric_has_a_definition_and_a_source() -> None:
    for metric in METRICS:
        assert len(metric.definition) > 40, metric.name
        assert len(metric.source) > 15, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


PREFILL = step_time(
    Phase.PREFILL,
    estimate(0.2, 0.1, 0.4),
    0.12,
    exposed_s=0.06,
    idle_s=0.02,
    collective_s=0.1,
    exposed_by_axis_s={"tp": 0.05, "fsdp": 0.01},
    by_basis_s={"compiler_cycles": 0.12, "interconnect_model": 0.06},
    parts=(part_cost("mlp", 0.12, collective_s=0.1, exposed_s=0.06),),
    unestimated=(
        UnestimatedWork(
            opcode="frobnicate", count=3, seconds=estimate(0.02, 0.0, 0.2), is_known=False
        ),
    ),
    is_extrapolated=True,
    notes=("a caveat",),
)
DECODE = replace(PREFILL, phase=Phase.DECODE, step=estimate(0.002))


@pytest.fixture
def timed_run(compiled_run: RunRecord) -> RunRecord:
    workload = {"workload": Workload(output=11)}
    return varied(compiled_run, experiment=workload, times=(PREFILL, DECODE))


def test_the_full_text_below_the_answer(timed_run: RunRecord) -> None:
    """Every figure with its interval, basis and caveat: collectives, totals, times, memory."""
    _, _, text = run_output(timed_run, 100, view=full_text).partition("\n\n")
    assert f"{text}\n" == (DATA / "full.txt").read_text("utf-8")


def test_document_has_the_same_figures(timed_run: RunRecord):
    time = run_document(timed_run)["time"]
    assert (time["ttft_s"], time["tpot_s"], time["e2e_s"]) == pytest.approx((0.2, 0.002, 0.22))
    assert time["basis"] == "compiler_cycles+interconnect_model"
    assert time["intervals"]["ttft_s"] == [0.1, 0.4]
    assert time["intervals"]["e2e_s"] == [None, None]
    assert time["is_extrapolated"]
    assert time["steps"]["prefill"]["step"] == {"s": 0.2, "low_s": 0.1, "high_s": 0.4}
    assert time["steps"]["prefill"]["unestimated_frac"] == pytest.approx(0.1)


def test_a_run_without_modeled_steps_prints_nothing_and_has_nulls(compiled_run: RunRecord):
    assert [*time_lines(compiled_run), *caveat_lines(compiled_run)] == []
    assert set(run_document(compiled_run)["time"].values()) == {None}
    assert "roofline" not in run_document(compiled_run)


def test_a_basis_is_cut_after_a_phrase_and_never_wider_than_a_line():
    phrases = ["constants fitted to 31 published steps of other chips", "constants of a profile"]
    basis = "; ".join(phrases)
    short, whole = (shown_lines(["1 ms"], basis, is_whole=is_whole) for is_whole in (False, True))
    assert short == ["1 ms", f"basis: {phrases[0]}; --full"]
    assert " ".join(line.strip() for line in whole[1:]) == f"basis: {basis}"
    assert len(shown_lines(["1 ms"], "a word " * 30)[1]) <= 80


def test_an_answer_without_a_gap_stops_before_a_sentence() -> None:
    sentences = [line for n in range(5) for line in (f"{n} of many", "  words", "  in lines")]
    *shown, last = shown_lines(sentences)
    assert shown == sentences[:9]
    assert last == "--full adds 6 lines"


def test_runs_of_other_work_are_named_by_model_and_request(timed_run: RunRecord):
    other = varied(timed_run, experiment={"workload": Workload(output=11, batch=64)})
    named = NamedModel(name="of/Another-70B")
    third = varied(timed_run, experiment={"model": named})
    words = differing_work([timed_run, other, third])
    assert words[1].endswith("batch 64")
    assert words[2].startswith("Another-70B batch ")
    assert len(set(words)) == 3
