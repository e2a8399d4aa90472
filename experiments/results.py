"""Results of a study in two CSV files: one row per case, and one row per collective of a case."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import Case, compile_case
from schedule import schedule_of

from meshscope.events.collective import Collective
from meshscope.plans.memory import compiled_memory
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import program_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.units import format_shape

KEY = ("study", "model", "slice", "way")
CASES, COLLECTIVES, WINDOWS = "cases.csv", "collectives.csv", "windows.csv"


def run_study(cases: Iterable[Case], folder: Path) -> None:
    """Compiles the cases that are in neither the CSV files in `folder` nor `runs/`, and rewrites the files."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: read_table(folder / name) for name in (CASES, COLLECTIVES, WINDOWS)}
    known = {key_of(row) for row in tables[CASES]}
    for case in cases:
        key = tuple(identity_of(case).values())
        if key not in known:
            compile_case(case)
        if not case.is_compiled:
            continue
        for name, rows in _results(case).items():
            others = [row for row in tables[name] if key_of(row) != key]
            tables[name] = [*others, *({**identity_of(case), **row} for row in rows)]
        for name, rows in tables.items():
            _write_table(folder / name, rows)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; empty if the file does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that identify the case of a row."""
    return tuple(str(row[name]) for name in KEY)


def identity_of(case: Case) -> dict[str, str]:
    """The columns that identify the case."""
    topology = case.experiment.topology.name
    return dict(zip(KEY, (case.study, case.model, topology, case.way), strict=True))


def _results(case: Case) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file for one case."""
    if not case.report.exists():
        refused = {"refused": case.refusal.read_text(encoding="utf-8")}
        return {CASES: [conditions_of(case) | refused], COLLECTIVES: [], WINDOWS: []}
    report = json.loads(case.report.read_text(encoding="utf-8"))
    module = read_hlo(case.hlo)
    rows = program_collectives(case.experiment, case.phase, module)
    n_chunks = case.experiment.n_chunks(case.phase)
    rows = [replace(row, count=row.count * n_chunks) for row in rows]
    schedule = schedule_of(module)
    memory = compiled_memory(case.experiment, [report["memory"]])
    of_case = conditions_of(case) | {
        "weights_bytes": memory.weights_bytes,
        "argument_bytes": report["memory"]["argument_bytes"],
        "temp_bytes": memory.temp_bytes,
        "moe_wire_bytes": _wire_bytes(rows, is_moe=True),
        "other_wire_bytes": _wire_bytes(rows, is_moe=False),
        "estimated_cycles": schedule.cycles,
        "covered_cycles": schedule.covered_cycles,
        "unestimated": " ".join(f"{n}x{opcode}" for opcode, n in schedule.unestimated.items()),
        "refused": "",
        **{name: report["versions"][name] for name in ("jax", "libtpu")},
    }
    windows = Counter(
        (
            scope_of(w.op_name).part or "",
            w.instruction.opcode.removesuffix("-start"),
            w.instruction.shape,
            w.is_async,
            w.hidden_cycles,
            w.n_unestimated,
        )
        for w in schedule.windows
        for _ in range(w.count)
    )
    names = ("part", "opcode", "result", "is_async", "hidden_cycles", "n_unestimated")
    return {
        CASES: [of_case],
        COLLECTIVES: _collectives(rows),
        WINDOWS: [dict(zip(names, key, strict=True)) | {"count": n} for key, n in windows.items()],
    }


def conditions_of(case: Case) -> dict[str, Any]:
    """What was compiled."""
    experiment = case.experiment
    moe = experiment.model.moe
    return {
        "n_devices": case.n_devices,
        "plan": str(experiment.plan),
        "n_layers": experiment.model.n_layers,
        "tokens_a_device": experiment.workload.batch * experiment.workload.prompt // case.n_devices,
        "hidden": experiment.model.hidden,
        "n_experts": moe.n_experts if moe else "",
        "n_active": moe.n_active if moe else "",
        "flags": case.flags,
    }


def _is_moe(row: Collective) -> bool:
    return row.part is not None and row.part.value.startswith("moe.")


def _wire_bytes(rows: Sequence[Collective], *, is_moe: bool) -> int:
    """Bytes that one device sends in one step, in the parts of the experts or in all other parts."""
    of_kind = (row for row in rows if _is_moe(row) is is_moe)
    return round(sum(row.count * (row.wire_bytes or 0) for row in of_kind))


def _collectives(rows: Sequence[Collective]) -> list[dict[str, Any]]:
    """Merges rows that differ only in layer and name."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        array = f"{row.dtype}{format_shape(row.shape)}" if row.shape is not None else row.hlo_shape
        wire_bytes = "" if row.wire_bytes is None else round(row.wire_bytes)
        counts[
            row.part or "",
            row.kind.value,
            row.opcode,
            array,
            row.payload_bytes,
            wire_bytes,
            row.is_async,
            row.algorithm or "",
            row.inserted_by or "",
        ] += row.count
    names = ("part", "kind", "opcode", "array", "payload_bytes", "wire_bytes", "is_async")
    names += ("algorithm", "inserted_by")
    return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in counts.items()]


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one line per row; columns are in the order of their first occurrence."""
    columns = dict.fromkeys(column for row in rows for column in row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
