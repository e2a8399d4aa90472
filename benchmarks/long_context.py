"""Prefill and decode of long prompts: the tables of docs/evidence/long-prompts.md.

    python benchmarks/long_context.py RUN...

writes long_context.csv from runs that `meshscope compile` saved; without arguments, prints all tables.
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshscope
from meshscope.api.options import request_of
from meshscope.api.records import predicted_record
from meshscope.api.request import ExperimentRequest
from meshscope.api.run import Run
from meshscope.cost.predicted import with_default_chunk
from meshscope.events.enums import Phase, Source
from meshscope.plans.experiment import Experiment
from meshscope.units import format_bytes, format_seconds

CSV = Path(__file__).with_suffix(".csv")
OUTPUT = 1024
LENGTHS = {"128k": 131_072 - OUTPUT, "1M": 1_048_576 - OUTPUT}
COLUMNS = (
    "model",
    "topology",
    "plan",
    "context",
    "chunk",
    "prompt",
    "ttft_s",
    "tpot_s",
    "total_bytes",
)
COLUMNS += ("prefill_compile_s", "jax", "libtpu")
MODELS = (
    ("meta-llama/Llama-3.1-8B", "v6e-8", ("tp=8", "cp=2,tp=4", "cp=4,tp=2", "cp=8")),
    ("Qwen/Qwen3-32B", "v6e-8", ("tp=8", "cp=2,tp=4")),
    ("meta-llama/Llama-3.1-70B", "v5p:2x2x2", ("tp=8", "cp=2,tp=4")),
    ("deepseek-ai/DeepSeek-V2-Lite", "v6e-8", ("tp=8", "cp=2,tp=4")),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "v5p:2x2x2", ("tp=8", "cp=2,tp=4")),
    ("deepseek-ai/DeepSeek-V3.1-Base", "v5p:4x4x4", ("tp=64,ep=64", "cp=2,tp=32,ep=32")),
    ("deepseek-ai/DeepSeek-V4-Flash", "v6e-8", ("tp=8",)),
)


def long_experiment(values: dict[str, Any], prompt: int) -> Experiment:
    """The experiment with one prompt; a model with fewer positions is taken as if it had enough.

    The lengthened model differs in nothing else: no factor of rotary embeddings changes a shape.
    """
    if "DeepSeek-V3" in values["model"]:
        values = values | {"weight_dtype": "f8e4m3fn"}  # scales of blocks do not divide over tp=32
    short = request_of(ExperimentRequest, values | {"prompt": 1024, "output": OUTPUT}).experiment()
    longest = max(prompt + OUTPUT, short.model.max_position or 0)
    workload = replace(short.workload, prompt=prompt)
    whole = replace(short, model=replace(short.model, max_position=longest), workload=workload)
    return with_default_chunk(whole) if values["prefill_chunk"] == "auto" else whole


def predicted(*names: str, prompt: int, context: str = "auto", chunk: str = "auto") -> Run:
    """The prediction for a model, slice and plan."""
    values = dict(zip(("model", "topology", "plan"), names, strict=True))
    values |= {"context": context, "prefill_chunk": chunk}
    return Run(record=predicted_record(long_experiment(values, prompt), ()))


def memory_table() -> None:
    """Weights, cache and the whole of a device at both lengths, with prefill whole and in chunks."""
    head = [f"cache, {length}" for length in LENGTHS]
    head += [
        f"all, {length}{how}" for length in LENGTHS for how in (" in chunks", ", whole prompt")
    ]
    _print_head("model", "slice", "plan", "weights", *head)
    for model, topology, plans in MODELS:
        for plan in plans:
            memories = [
                predicted(model, topology, plan, prompt=prompt, chunk=chunk).record.memory
                for prompt in LENGTHS.values()
                for chunk in ("auto", "off")
            ]
            of = [memory[Source.PREDICTED] for memory in memories]
            cells = [of[0].weights_bytes, of[0].kv_cache_bytes, of[2].kv_cache_bytes]
            cells += [memory.total_bytes for memory in of]
            _print_row(_short(model), topology, f"`{plan}`", *map(_gib, cells))


def times_table(length: str) -> None:
    """TTFT and TPOT of each plan; over cp by all-gather of queries in chunks, by ring and by all-gather."""
    _print_head("model", "slice", "plan", "keys over cp", "TTFT", "TPOT", "fits")
    for model, topology, plans in MODELS:
        for plan in plans:
            for context in ("auto", "ring", "allgather") if "cp" in plan else ("auto",):
                run = predicted(model, topology, plan, prompt=LENGTHS[length], context=context)
                chunks = run.record.manifest.experiment.prefill_chunks
                is_cut = chunks is not None and chunks.is_cut
                if "cp" in plan and context == "auto" and not is_cut:
                    continue  # a ring
                fits = run.record.memory[Source.PREDICTED].fits
                answer = "close" if fits is None else "yes" if fits else "no"
                label = ("queries" if is_cut else context) if "cp" in plan else ""
                _print_row(_short(model), topology, f"`{plan}`", label, *_times(run), answer)


def chunks_table() -> None:
    """Llama-3.1-8B under cp=2,tp=4, by the size of chunks."""
    _print_head("length", "chunk", "TTFT", "GiB of a device", "sent over cp", "fits")
    for length, prompt in LENGTHS.items():
        for chunk in ("off", "1024", "7936", "16256", "33792"):
            if chunk.isdigit() and prompt % int(chunk):
                continue
            run = predicted(*MODELS[0][:2], "cp=2,tp=4", prompt=prompt, chunk=chunk)
            memory = run.record.memory[Source.PREDICTED]
            wire = sum(
                row.wire_bytes * row.count
                for row in run.record.rows
                if row.axis == "cp" and row.phase is Phase.PREFILL
            )
            fits = "close" if memory.fits is None else "yes" if memory.fits else "no"
            label = "whole" if chunk == "off" else chunk
            cells = (_times(run)[0], _gib(memory.total_bytes), format_bytes(wire), fits)
            _print_row(length, label, *cells)


def compiled_table() -> None:
    """The compiled programs beside the predictions of the same experiments."""
    _print_head(
        *(
            "model",
            "plan",
            "keys over cp, chunk",
            "TTFT predicted",
            "compiled",
            "TPOT predicted",
            "compiled",
        ),
        *("GiB predicted", "compiled", "prefill compiled in"),
    )
    with CSV.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        names = [row[name] for name in ("model", "topology", "plan")]
        context = row["context"] if row["chunk"] == "off" else "auto"
        run = predicted(*names, prompt=int(row["prompt"]), context=context, chunk=row["chunk"])
        memory = run.record.memory[Source.PREDICTED]
        ttft, tpot = _times(run)
        _print_row(
            _short(row["model"]),
            f"`{row['plan']}`",
            _form(row),
            *(ttft, format_seconds(float(row["ttft_s"]))),
            *(tpot, format_seconds(float(row["tpot_s"]))),
            *(_gib(memory.total_bytes), _gib(int(row["total_bytes"]))),
            format_seconds(float(row["prefill_compile_s"])),
        )


def _form(row: dict[str, str]) -> str:
    """How keys reach queries, and the chunk of a prompt that is not prefilled whole."""
    is_cut, has_cp = row["chunk"] != "off", "cp" in row["plan"]
    if not is_cut:
        return row["context"] if has_cp else ""
    return f"{'queries, ' if has_cp else ''}{int(row['chunk']):,}"


def write_rows(runs: list[str]) -> None:
    """One row per compiled run, in the order given."""
    with CSV.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for path in runs:
            run = meshscope.open(path)[0]
            manifest = run.record.manifest
            recorded = manifest.experiment
            command = manifest.command
            writer.writerow(
                (
                    *(recorded.model.name, command[command.index("--topology") + 1]),
                    *(command[command.index("--plan") + 1], recorded.context or "auto"),
                    recorded.workload.prefill_chunk or "off",
                    *(recorded.workload.prompt, *_compiled_times(run)),
                    run.record.memory[Source.COMPILED].total_bytes,
                    round(manifest.seconds["prefill.compile"], 1),
                    *(manifest.versions["jax"], manifest.versions["libtpu"]),
                )
            )


def _compiled_times(run: Run) -> list[float]:
    return [time.step.value_s for time in run.record.times if time.source is Source.COMPILED]


def _times(run: Run) -> list[str]:
    return [format_seconds(time.step.value_s) for time in run.record.times]


def _gib(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else f"{n_bytes / 2**30:.1f}"


def _short(model: str) -> str:
    return model.partition("/")[2]


def _print_head(*names: str) -> None:
    _print_row(*names)
    _print_row(*["---"] * len(names))


def _print_row(*cells: str) -> None:
    print("|", " | ".join(cells), "|")


def main() -> None:
    """Writes the CSV file from the runs; without any, prints all tables."""
    if sys.argv[1:]:
        write_rows(sys.argv[1:])
        return
    memory_table()
    for length in LENGTHS:
        times_table(length)
    compiled_table()


if __name__ == "__main__":
    main()
