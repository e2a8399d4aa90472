"""The study of docs/evidence/study.md: predicts every point of study.yaml into Parquet files.

    python experiments/study.py            points.parquet and collectives.parquet in docs/study

A part is one model on one generation; finished parts are kept in `runs/study/parts`, so an interrupted study
goes on; those of other code are not used. study_compiled.py adds what the TPU compiler makes of a part of the plan.
"""

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import yaml

import meshscope
from meshscope.analysis.request import modeled_request_time
from meshscope.api.records import predicted_record
from meshscope.errors import MeshscopeError
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Source
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.store.run import RunRecord

ROOT = Path(__file__).parents[1]
PLAN = Path(__file__).parent / "study.yaml"
PARTS = ROOT / "runs" / "study" / "parts"
DATA = ROOT / "docs" / "evidence" / "study"
PACKAGE = Path(meshscope.__file__).parent
PREDICTING = ("model", "plans", "events", "hardware", "cost", "analysis/request.py")

Row = dict[str, Any]

# Columns of points.parquet: type, unit and meaning. Figures are of one device; a decode step is at full cache.
POINT_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "point": (pl.String, "", "identifies the point: model, slice, plan, batch and prompt"),
    "model": (pl.String, "", "id of the model"),
    "is_moe": (pl.Boolean, "", "whether the model is a mixture of experts"),
    "chip": (pl.String, "", "generation of the TPU"),
    "topology": (pl.String, "", "slice"),
    "n_chips": (pl.Int32, "chips", "chips of the slice"),
    "n_devices": (pl.Int32, "devices", "devices of the slice; two a chip on tpu7x"),
    "strategy": (pl.String, "", "strategy of study.yaml"),
    "plan": (pl.String, "", "plan; null if refused before it was known"),
    "batch": (pl.Int32, "sequences", "sequences over all devices"),
    "prompt": (pl.Int32, "tokens", "input tokens of a sequence"),
    "output": (pl.Int32, "tokens", "output tokens of a sequence"),
    "refused": (pl.String, "", "why the point is impossible; null if it is possible"),
    "fits": (pl.Boolean, "", "whether the memory of a device suffices"),
    "total_bytes": (pl.Int64, "bytes", "weights, cache and temporaries of a device"),
    **{
        f"{phase}_{name}": column
        for phase in ("prefill", "decode")
        for name, column in {
            "count": (pl.Int32, "times", "collectives of a step"),
            "payload_bytes": (pl.Int64, "bytes", "payload of all collectives of a step"),
            "wire_bytes": (pl.Float64, "bytes", "bytes that a device sends in a step"),
            "s": (pl.Float32, "s", "duration of a step, predicted"),
            "low_s": (pl.Float32, "s", "lower bound of the duration"),
            "high_s": (pl.Float32, "s", "upper bound of the duration"),
            "exposed_s": (pl.Float32, "s", "communication that no compute hides"),
            "bubble_s": (pl.Float32, "s", "waiting for other pipeline stages"),
            "compute_s": (pl.Float32, "s", "compute"),
        }.items()
    },
    "e2e_s": (pl.Float32, "s", "a request: prefill and all decode steps"),
    "e2e_low_s": (pl.Float32, "s", "lower bound of the request"),
    "e2e_high_s": (pl.Float32, "s", "upper bound of the request"),
    "tokens_per_s_per_chip": (
        pl.Float64,
        "tokens/s",
        "request tokens/s per chip: batch x output over the request",
    ),
    "is_extrapolated": (
        pl.Boolean,
        "",
        "whether a constant was fitted to other chips or dtypes only",
    ),
}

# Columns of collectives.parquet: the collectives of a step of each possible point, of one size and axis in a row.
COLLECTIVE_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "point": (pl.String, "", "the point of points.parquet"),
    "phase": (pl.String, "", "prefill or decode"),
    "kind": (pl.String, "", "kind of collective"),
    "axis": (pl.String, "", "plan axis"),
    "is_expert": (pl.Boolean, "", "whether it belongs to the experts: dispatch, combine, ..."),
    "group_size": (pl.Int32, "devices", "devices of a group"),
    "count": (pl.Int32, "times", "executions in a step on one device"),
    "payload_bytes": (pl.Int64, "bytes", "logical array of one operation"),
    "wire_bytes": (pl.Float64, "bytes", "bytes that a device sends for one operation"),
    "dur_s": (pl.Float32, "s", "duration of one operation, predicted"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of the plan; `experiment` is None if it is impossible."""

    row: Row
    experiment: Experiment | None


def points_of(plan: Mapping[str, Any], model: str, chip: str) -> Iterator[Point]:
    """The points of a model on a generation, without strategies that repeat a plan."""
    parsed = read_model(model)
    for n_chips, grid in plan["slices"][chip].items():
        topology = parse_topology(f"{chip}:{grid}")
        seen: set[str] = set()
        for strategy, text in plan["strategies"].items():
            if "ep" in text and parsed.moe is None:
                continue
            about: Row = {"model": model, "is_moe": parsed.moe is not None, "chip": chip}
            about |= {"topology": topology.name, "n_chips": n_chips}
            about |= {
                "n_devices": topology.n_devices,
                "strategy": strategy,
                "output": plan["output"],
            }
            try:
                filled = parse_plan(text).filled(topology.n_devices)
            except MeshscopeError as error:
                yield Point(row=about | {"refused": str(error)}, experiment=None)
                continue
            if str(filled) in seen:
                continue
            seen.add(str(filled))
            for batch in plan["batch"]:
                for prompt in plan["prompt"]:
                    yield point_of(about | {"plan": str(filled), "batch": batch, "prompt": prompt})


def point_of(about: Row) -> Point:
    """The point with this model, slice, plan and workload."""
    workload = Workload(batch=about["batch"], prompt=about["prompt"], output=about["output"])
    name = "|".join(
        str(about[n]) for n in ("model", "topology", "plan", "batch", "prompt")
    ).rpartition("/")[2]
    try:
        experiment = experiment_of(
            model=read_model(about["model"]),
            plan=parse_plan(about["plan"]),
            topology=parse_topology(about["topology"]),
            workload=workload,
        ).with_auto_chunk()
    except MeshscopeError as error:
        return Point(row=about | {"point": name, "refused": str(error)}, experiment=None)
    return Point(row=about | {"point": name}, experiment=experiment)


def predicted_rows(point: Point) -> tuple[Row, list[Row]]:
    """The point's figures, and its collectives."""
    if point.experiment is None:
        return point.row, []
    run = predicted_record(point.experiment, ("meshscope", "predict"))
    memory = run.memory[Source.PREDICTED]
    row = point.row | {"total_bytes": memory.total_bytes, "fits": memory.fits}
    for time in run.times:
        row |= _step(time, run.rows)
    return row | _request(run), [
        {"point": row["point"], **collective} for collective in grouped(run.rows)
    ]


def _step(time: StepTime, rows: Sequence[Collective]) -> Row:
    """Duration and collectives of a step, with the phase in the names."""
    of_phase = [row for row in rows if row.phase is time.phase]
    figures = {
        "count": sum(row.count for row in of_phase),
        "payload_bytes": sum(row.count * (row.payload_bytes or 0) for row in of_phase),
        "wire_bytes": float(sum(row.count * (row.wire_bytes or 0) for row in of_phase)),
        "s": time.step.value_s,
        "low_s": time.step.low_s,
        "high_s": time.step.high_s,
        "exposed_s": time.exposed_s,
        "bubble_s": time.bubble_s,
        "compute_s": time.compute_s,
    }
    return {f"{time.phase}_{name}": value for name, value in figures.items()}


def _request(run: RunRecord) -> Row:
    experiment = run.manifest.experiment
    workload, n_chips = experiment.workload, experiment.n_chips
    assert workload is not None
    request = modeled_request_time(run.times, n_decode_steps=workload.n_decode_steps)
    e2e = request.e2e
    if e2e is None or n_chips is None:
        return {"is_extrapolated": request.is_extrapolated}
    rate = workload.batch * workload.output / e2e.value_s / n_chips
    return {
        "e2e_s": e2e.value_s,
        "e2e_low_s": e2e.low_s,
        "e2e_high_s": e2e.high_s,
        "tokens_per_s_per_chip": rate,
        "is_extrapolated": request.is_extrapolated,
    }


def grouped(rows: Sequence[Collective]) -> list[Row]:
    """Collectives that differ only in layer, part and name as one row; two rows if their times differ."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        if row.phase not in REQUEST_PHASES:
            continue
        is_expert = row.part is not None and row.part.value.startswith("moe.")
        wire_bytes = None if row.wire_bytes is None else float(row.wire_bytes)
        key = (row.phase.value, row.kind.value, row.axis, is_expert, row.group_size)
        counts[*key, row.payload_bytes, wire_bytes, row.dur_s] += row.count
    names = ("phase", "kind", "axis", "is_expert", "group_size")
    names += ("payload_bytes", "wire_bytes", "dur_s")
    return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in counts.items()]


def make_part(model: str, chip: str) -> None:
    """Predicts the points of a model on a generation, and writes both tables whole or not at all."""
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    points: list[Row] = []
    collectives: list[Row] = []
    for point in points_of(plan, model, chip):
        row, of_point = predicted_rows(point)
        points.append(row)
        collectives += of_point
    write_table(frame(collectives, COLLECTIVE_COLUMNS), _part("collectives", model, chip))
    write_table(
        frame(points, POINT_COLUMNS), _part("points", model, chip)
    )  # marks the part as done


def frame(rows: Sequence[Row], columns: Mapping[str, tuple[Any, str, str]]) -> pl.DataFrame:
    """The rows as a table with these columns."""
    return pl.DataFrame(rows, schema={name: column[0] for name, column in columns.items()})


def _part(table: str, model: str, chip: str) -> Path:
    """The file of a part; another plan or another code of predictions has other files."""
    digest = hashlib.sha256(PLAN.read_bytes() + _code()).hexdigest()[:8]
    return PARTS / digest / f"{table}-{chip}-{model.replace('/', '--')}.parquet"


@cache
def _code() -> bytes:
    """The source and data that predictions follow from."""
    homes = [PACKAGE / name for name in PREDICTING]
    if absent := [str(home) for home in homes if not home.exists()]:
        raise FileNotFoundError(f"PREDICTING names what is not there: {', '.join(absent)}")
    files = [path for home in homes for path in (home, *home.rglob("*")) if path.is_file()]
    return b"".join(path.read_bytes() for path in sorted(files) if path.suffix != ".pyc")


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Writes the table whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    table.write_parquet(partial, compression="zstd", compression_level=19, statistics=False)
    partial.replace(path)


def make_parts(*, n_jobs: int, force: bool) -> None:
    """Predicts the missing parts, or all with `force`, and joins them; without jobs, in this process."""
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    parts = [(model, chip) for model in plan["models"] for chip in plan["slices"]]
    missing = [part for part in parts if force or not _part("points", *part).exists()]
    if not n_jobs:
        for part in missing:
            make_part(*part)
    else:
        with ProcessPoolExecutor(n_jobs) as pool:
            made = {pool.submit(make_part, *part): part for part in missing}
            for n_done, one in enumerate(as_completed(made), start=1):
                one.result()
                sys.stderr.write(f"{n_done}/{len(missing)} {' '.join(made[one])}\n")
    for table in ("collectives", "points"):
        joined = pl.concat([pl.read_parquet(_part(table, *part)) for part in parts])
        write_table(joined, DATA / f"{table}.parquet")


def main() -> None:
    """Predicts what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--force", action="store_true", help="predict every part again")
    asked = parser.parse_args()
    make_parts(n_jobs=asked.jobs, force=asked.force)


if __name__ == "__main__":
    main()
