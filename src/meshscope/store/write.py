"""Writes what a run holds into a folder: events.parquet, metrics.json, and the manifest last."""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.events.schema import SCHEMA_VERSION, table_of
from meshscope.store.folder import MANIFEST, TOOL
from meshscope.store.run import RunRecord
from meshscope.store.stored_times import time_as_dict

EVENTS = "events.parquet"
METRICS = "metrics.json"
HLO = "hlo"


def write_run(folder: Path, run: RunRecord, *, metrics: Mapping[str, Any]) -> None:
    """Fills `folder`, which may hold `hlo/` already; `metrics` are figures derived from the rows."""
    write_table(table_of(run.rows), folder / EVENTS)
    memory = {source.value: asdict(figures) for source, figures in run.memory.items()}
    measured = {} if run.measured is None else {"measured": asdict(run.measured)}
    times = {"times": [time_as_dict(time) for time in run.times]} if run.times else {}
    _write_json(folder / METRICS, {"memory": memory, **measured, **times, **metrics})
    _write_json(folder / MANIFEST, {**_manifest(run), "files": _hashes(folder)})


def write_table(frame: pl.DataFrame, path: Path) -> None:
    """Writes the table as Parquet; OSError where the disk is full.

    By way of memory: polars itself tells a full disk as a fault of the Parquet format.
    """
    content = io.BytesIO()
    frame.write_parquet(content)
    path.write_bytes(content.getbuffer())


def _manifest(run: RunRecord) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "tool": TOOL,
        "schema": SCHEMA_VERSION,
        "source": manifest.source.value,
        "phases": [phase.value for phase in manifest.phases],
        "created": manifest.created,
        "command": list(manifest.command),
        "versions": dict(manifest.versions),
        "flags": dict(manifest.flags),
        "seconds": dict(manifest.seconds),
        "experiment": dict(manifest.experiment),
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    """In one step: a manifest that was cut short would no longer say whose folder it is in."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): sha256(path) for path in files if path.name != MANIFEST
    }
