"""What the TPU compiler made of a part of the study: reads the runs of study-compile.yaml into Parquet files.

    meshscope sweep experiments/study-compile.yaml --out runs/study/compiled
    python experiments/study_compiled.py       programs.parquet, operations.parquet and cards in docs/study
    python experiments/study_compiled.py --predictions       only the predictions in them, without the runs

vLLM's programs for TPU come from HLO files in tests/published/programs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

import meshscope
from meshscope.api.records import predicted_record
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Phase, Source
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Partitioner, Program
from meshscope.plans.workload import Workload
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord

sys.path.insert(0, str(Path(__file__).parent))

from study import DATA, ROOT, Row, frame, write_table

RUNS = ROOT / "runs" / "study" / "compiled"
CARDS = DATA / "cards"
VENDORED = ROOT / "tests" / "published" / "programs"
ENGINE = "vLLM 0.12 on TPU"
OUTPUT = 128  # tokens, as in study-compile.yaml

# Columns of programs.parquet: a row for each run, phase and source.
PROGRAM_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "run": (pl.String, "", "folder of the run; its CCL-Bench card is cards/RUN.yaml"),
    "model": (pl.String, "", "id of the model"),
    "n_layers": (pl.Int32, "layers", "layers that were compiled"),
    "chip": (pl.String, "", "generation of the TPU"),
    "topology": (pl.String, "", "slice"),
    "n_chips": (pl.Int32, "chips", "chips of the slice"),
    "plan": (pl.String, "", "plan"),
    "program": (pl.String, "", "jax, torchxla, or the serving engine"),
    "partitioner": (pl.String, "", "manual or auto; null for an engine"),
    "batch": (pl.Int32, "sequences", "sequences over all devices; null for an engine"),
    "prompt": (pl.Int32, "tokens", "input tokens of a sequence; null for an engine"),
    "phase": (pl.String, "", "prefill or decode"),
    "source": (pl.String, "", "predicted or compiled"),
    "count": (pl.Int32, "times", "collectives of a step on one device"),
    "payload_bytes": (pl.Int64, "bytes", "payload of all collectives of a step"),
    "wire_bytes": (pl.Float64, "bytes", "bytes that a device sends in a step"),
    "step_s": (pl.Float32, "s", "modeled duration of a step"),
    "low_s": (pl.Float32, "s", "lower bound of the duration"),
    "high_s": (pl.Float32, "s", "upper bound of the duration"),
    "exposed_s": (pl.Float32, "s", "communication that no compute hides"),
    "temp_bytes": (pl.Int64, "bytes", "temporary memory of a device"),
    "libtpu": (pl.String, "", "version of the compiler"),
}

# Columns of operations.parquet: the collectives of a step of each program, equal ones in a row.
OPERATION_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "run": (pl.String, "", "the run of programs.parquet"),
    "phase": (pl.String, "", "prefill or decode"),
    "source": (pl.String, "", "predicted or compiled"),
    "part": (pl.String, "", "part of the model"),
    "kind": (pl.String, "", "kind of collective"),
    "opcode": (pl.String, "", "what the compiler calls it"),
    "axis": (pl.String, "", "plan axis"),
    "group_size": (pl.Int32, "devices", "devices of a group"),
    "payload_bytes": (pl.Int64, "bytes", "logical array of one operation"),
    "wire_bytes": (pl.Float64, "bytes", "bytes that a device sends for one operation"),
    "is_async": (pl.Boolean, "", "whether it is a pair of start and done"),
    "algorithm": (pl.String, "", "emitter and strategy of the compiler"),
    "inserted_by": (pl.String, "", "program or partitioner"),
    "count": (pl.Int32, "times", "executions in a step on one device"),
}


def runs() -> Iterator[tuple[str, RunRecord, str]]:
    """Name, record and kind of program of every run: the sweep's, then vLLM's."""
    for manifest in sorted(RUNS.glob("*/manifest.json")):
        record = read_run(manifest.parent)
        program = record.manifest.experiment.program
        assert program is not None
        yield manifest.parent.name, record, program.frontend.value
    with tempfile.TemporaryDirectory() as folder:
        yield "vllm-0.12-llama-8b-v6e-2x4-tp8", _engine_run(Path(folder) / "run"), ENGINE


def _engine_run(out: Path) -> RunRecord:
    """The programs of Llama-3.1-8B with two layers by vLLM, on eight v6e chips."""
    folder = os.path.relpath(VENDORED)  # the card shows it
    stem = "tpu_inference_0.12-llama-8b-v6e_2x4-tp8"
    return meshscope.import_(
        [
            f"prefill={folder}/{stem}-prefill8192-2layers.hlo.txt.gz",
            f"decode={folder}/{stem}-decode-1024pages-2layers.hlo.txt.gz",
        ],
        topology="v6e-8",
        mesh="model=8",
        device_order="0,2,4,6,7,5,3,1",
        model="meta-llama/Llama-3.1-8B",
        layers=2,
        step_lengths="prefill=8x1024:1024,decode=64x1:1088",
        out=out,
    ).record


def program_rows(name: str, record: RunRecord, program: str) -> Iterator[Row]:
    """The rows of one run in programs.parquet."""
    experiment = record.manifest.experiment
    topology, workload = experiment.topology, experiment.workload
    assert topology is not None
    is_engine = program == ENGINE
    about: Row = {
        "run": name,
        "model": "meta-llama/Llama-3.1-8B" if is_engine else experiment.model_name,
        "n_layers": 2 if is_engine else experiment.n_layers,
        "chip": topology.chip.name,
        "topology": topology.name,
        "n_chips": topology.n_chips,
        "plan": "tp=8" if is_engine else str(experiment.plan),
        "program": program,
        "partitioner": None
        if experiment.program is None or is_engine
        else experiment.program.partitioner.value,
        "batch": None if workload is None else workload.batch,
        "prompt": None if workload is None else workload.prompt,
        "libtpu": record.manifest.versions.get("libtpu"),
    }
    for source in (Source.PREDICTED, Source.COMPILED):
        for phase in REQUEST_PHASES:
            if rows := [row for row in record.rows_of(source) if row.phase is phase]:
                yield about | _figures(record, source, phase, rows)


def _figures(record: RunRecord, source: Source, phase: Phase, rows: Sequence[Collective]) -> Row:
    time = next((time for time in record.times_of(source) if time.phase is phase), None)
    memory = record.memory.get(source)
    row: Row = {
        "phase": phase.value,
        "source": source.value,
        "count": sum(row.count for row in rows),
        "payload_bytes": sum(row.count * (row.payload_bytes or 0) for row in rows),
        "wire_bytes": float(sum(row.count * (row.wire_bytes or 0) for row in rows)),
        "temp_bytes": None if memory is None else memory.temp_bytes,
    }
    if time is not None:
        step = time.step
        row |= {"step_s": step.value_s, "low_s": step.low_s, "high_s": step.high_s}
        row |= {"exposed_s": time.exposed_s}
    return row


def operation_rows(name: str, record: RunRecord) -> Iterator[Row]:
    """The rows of one run in operations.parquet."""
    names = [column for column in OPERATION_COLUMNS if column not in {"run", "count"}]
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in record.rows:
        if row.phase in REQUEST_PHASES:
            values = {column: getattr(row, column) for column in names}
            values["wire_bytes"] = None if row.wire_bytes is None else float(row.wire_bytes)
            counts[tuple(str(v) if hasattr(v, "value") else v for v in values.values())] += (
                row.count
            )
    for key, count in counts.items():
        yield {"run": name, **dict(zip(names, key, strict=True)), "count": count}


def predicted_again() -> tuple[list[Row], list[Row]]:
    """The stored rows of both tables, with predictions of the present code."""
    programs = pl.read_parquet(DATA / "programs.parquet").to_dicts()
    operations = pl.read_parquet(DATA / "operations.parquet").to_dicts()
    records = {
        row["run"]: predicted_record(_experiment(row), ("meshscope", "predict"))
        for row in programs
        if row["source"] == Source.PREDICTED
    }
    for row in programs:
        if row["source"] == Source.PREDICTED:
            record, phase = records[row["run"]], Phase(row["phase"])
            of_phase = [one for one in record.rows if one.phase is phase]
            row.update(_figures(record, Source.PREDICTED, phase, of_phase))
    compiled = [row for row in operations if row["source"] != Source.PREDICTED]
    return programs, compiled + [
        row for name, record in records.items() for row in operation_rows(name, record)
    ]


def _experiment(row: Row) -> Experiment:
    """The experiment of a row in programs.parquet."""
    return experiment_of(
        model=read_model(row["model"]),
        plan=parse_plan(row["plan"]),
        topology=parse_topology(row["topology"]),
        workload=Workload(batch=row["batch"], prompt=row["prompt"], output=OUTPUT),
        program=Program(partitioner=Partitioner(row["partitioner"])),
        n_layers=row["n_layers"],
    ).with_auto_chunk()


def main() -> None:
    """Writes both tables, and the cards of the runs."""
    if "--predictions" in sys.argv[1:]:
        write(*predicted_again())
        return
    programs: list[Row] = []
    operations: list[Row] = []
    shutil.rmtree(CARDS, ignore_errors=True)
    CARDS.mkdir(parents=True)
    for name, record, program in runs():
        programs += program_rows(name, record, program)
        operations += operation_rows(name, record)
        if record.path is not None and (record.path / "card.yaml").exists():
            shutil.copyfile(record.path / "card.yaml", CARDS / f"{name}.yaml")
    write(programs, operations)


def write(programs: list[Row], operations: list[Row]) -> None:
    """Writes both tables."""
    write_table(frame(programs, PROGRAM_COLUMNS), DATA / "programs.parquet")
    write_table(frame(operations, OPERATION_COLUMNS), DATA / "operations.parquet")
    sys.stderr.write(json.dumps({"programs": len(programs), "operations": len(operations)}) + "\n")


if __name__ == "__main__":
    main()
