"""Reads a run folder; whatever is wrong with it is one RunError with the remedy."""

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from shlex import join
from typing import Any

import polars as pl

from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.measured import CollectiveTime, DeviceLoad, Measured, Request, StepCost
from meshscope.events.schema import POLARS_SCHEMA, SCHEMA_VERSION, checked_table
from meshscope.spec.plan.memory import Memory
from meshscope.store.folder import MANIFEST, TOOL, partial_name
from meshscope.store.run import Manifest, RunRecord
from meshscope.store.stored_times import time_from_dict
from meshscope.store.write import EVENTS, METRICS, sha256


def read_run(path: Path) -> RunRecord:
    """The run in this folder; RunError when it is missing, half-written, damaged or of another schema."""
    document = read_manifest(path)
    frame = _read_events(path, document)
    metrics = _read_json(path / METRICS)
    try:
        return RunRecord(
            path=path,
            manifest=_manifest(document),
            rows=tuple(_collectives(frame)),
            memory={
                Source(source): Memory(**figures) for source, figures in metrics["memory"].items()
            },
            measured=_measured(metrics["measured"]) if "measured" in metrics else None,
            times=tuple(map(time_from_dict, metrics.get("times", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"run '{path}': {_reason(error)}. {_remedy(document, path)}") from error


def read_events(path: Path) -> pl.DataFrame:
    """The event table of the run in this folder, every column with its type; RunError as `read_run`."""
    return _read_events(path, read_manifest(path))


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of a run of this schema whose events are the ones that it names."""
    if not path.is_dir():
        raise RunError(f"no run at '{path}'. Give the folder of a run, as compile prints it.")
    if (name := partial_name(path)) is not None:
        raise RunError(
            f"'{path}' is half-written: the command that makes '{name}' runs or was interrupted. "
            "Wait for it, or run it again."
        )
    if not (path / MANIFEST).is_file():
        raise RunError(f"'{path}' is not a run: it has no {MANIFEST}. Give the folder of a run.")
    document = _read_json(path / MANIFEST)
    if document.get("tool") != TOOL:
        raise RunError(f"'{path}' is not a run: its {MANIFEST} is of another tool.")
    if document.get("schema") != SCHEMA_VERSION:
        raise RunError(
            f"run '{path}' has schema {document.get('schema')}, this version reads {SCHEMA_VERSION}. "
            f"{_remedy(document, path)}"
        )
    _check_events(path, document)
    return document


def _check_events(path: Path, document: Mapping[str, Any]) -> None:
    """Compares the file with its hash first: the Parquet reader may panic on a damaged one."""
    files = document.get("files")
    expected = files.get(EVENTS) if isinstance(files, dict) else None
    events = path / EVENTS
    if not events.is_file():
        raise RunError(f"run '{path}' has no {EVENTS}. {_remedy(document, path)}")
    if sha256(events) != expected:
        raise RunError(
            f"run '{path}': {EVENTS} is damaged or was changed. {_remedy(document, path)}"
        )


def _remedy(document: Mapping[str, Any], path: Path) -> str:
    """The command that makes the run again where it lies now, wherever it was made."""
    command = document.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return "Make the run again, with --force."
    words = [*_without(command, "--force", "--out"), "--out", str(path), "--force"]
    return f"Make it again: {join(words)}"


def _without(words: Sequence[str], flag: str, option: str) -> Iterator[str]:
    """The words but the flag, and the option with its value."""
    is_value = False
    for word in words:
        if not is_value and word not in {flag, option} and not word.startswith(f"{option}="):
            yield word
        is_value = not is_value and word == option


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return f"it holds what no run holds ({error})"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"cannot read '{path}': {error}. Make the run again, with --force."
        ) from error
    if not isinstance(document, dict):
        raise RunError(f"'{path}' is not a JSON object. Make the run again, with --force.")
    return document


def _read_events(path: Path, document: Mapping[str, Any]) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(path / EVENTS)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RunError(
            f"run '{path}': cannot read {EVENTS}: {error}. {_remedy(document, path)}"
        ) from error
    return checked_table(frame, str(path / EVENTS))


def _manifest(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        source=Source(document["source"]),
        experiment=_mapping(document, "experiment"),
        phases=tuple(Phase(phase) for phase in document["phases"]),
        command=tuple(document["command"]),
        created=str(document["created"]),
        versions=_mapping(document, "versions"),
        flags=_mapping(document, "flags"),
        seconds=_mapping(document, "seconds"),
    )


def _measured(document: Mapping[str, Any]) -> Measured:
    return Measured(
        requests=tuple(
            Request(prefill_s=r["prefill_s"], decode_s=tuple(r["decode_s"]))
            for r in document["requests"]
        ),
        n_profiled_steps={Phase(p): int(n) for p, n in document["n_profiled_steps"].items()},
        loads=tuple(DeviceLoad(**_typed(load)) for load in document["loads"]),
        times=tuple(CollectiveTime(**_typed(time)) for time in document["times"]),
        findings=tuple(document["findings"]),
        costs=tuple(StepCost(**_typed(cost)) for cost in document["costs"]),
        texts=tuple(document["texts"]),
    )


def _typed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with phase, part and kind as such."""
    enums = {"phase": Phase, "part": Part, "kind": Kind}
    return {
        name: enums[name](value) if name in enums and value is not None else value
        for name, value in record.items()
    }


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document[key]
    if not isinstance(value, dict):
        raise TypeError(f"'{key}' is not an object")
    return value


def _collectives(frame: pl.DataFrame) -> list[Collective]:
    """The collectives among the events; times are left to those who need them."""
    names = [name for name in Collective.__slots__ if name in POLARS_SCHEMA]
    rows = frame.filter(pl.col("kind").is_not_null()).select(names)
    return [_collective(record) for record in rows.iter_rows(named=True)]


def _collective(record: dict[str, Any]) -> Collective:
    typed: dict[str, Any] = {
        "source": Source(record["source"]),
        "phase": None if record["phase"] is None else Phase(record["phase"]),
        "part": None if record["part"] is None else Part(record["part"]),
        "kind": Kind(record["kind"]),
        "groups": tuple(tuple(group) for group in record["groups"]),
        "shape": None if record["shape"] is None else tuple(record["shape"]),
        "wire_bytes": _fraction(record["wire_bytes"], record["group_size"]),
    }
    return Collective(**{**record, **typed})


def _fraction(wire_bytes: float | None, group_size: int) -> Fraction | None:
    """The exact value behind the stored float: wire factors have the group size as denominator."""
    if wire_bytes is None:
        return None
    return Fraction(wire_bytes).limit_denominator(max(1, group_size))
